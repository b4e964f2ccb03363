"""Spreading the rows of shards that are not served over another number of shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recstore_ops import _native


@dataclass(frozen=True)
class Resharded:
    """The result of spreading rows over another number of shards.

    Attributes:
        before: how many shards there were; `None` if a checkpoint was spread.
        rows: the rows on each shard.
        hash_method: how ids are spread over them.
        data: the directory of the shards.
        moved_to: the directory to which the shards before were moved, if they were in the same directory.
    """

    before: int | None
    rows: list[int]
    hash_method: str
    data: Path
    moved_to: Path | None

    def __str__(self) -> str:
        before = "a checkpoint" if self.before is None else f"{self.before} shards"
        now = f"on {len(self.rows)} shards now, by {self.hash_method}"
        text = f"{self.data}: {sum(self.rows):,} rows of {before} are {now}"
        return text if self.moved_to is None else f"{text}; the shards before are in {self.moved_to}"


def reshard_directory(source: Path, target: Path, shards: int, hash_method: str | None = None) -> Resharded:
    """Spreads the rows of the shards in a directory, or of a checkpoint, over another number of shards.

    Nothing is removed: shards in the same directory are moved aside.

    Args:
        source: the directory of the shards, or of a checkpoint.
        target: the directory of the new shards; may be the same.
        shards: how many there will be.
        hash_method: how ids are spread over them; as before if not given.

    Raises:
        ValueError: a shard is missing or served, the target has other shards, or a file cannot be used.
    """
    try:
        before, rows, method, moved_to = _native.reshard(str(source), str(target), shards, hash_method)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    return Resharded(before, rows, method, target, None if moved_to is None else Path(moved_to))


def has_other_shards(data: Path, shards: int) -> bool:
    """Whether the rows in a directory are spread, and over another number of shards.

    Raises:
        ValueError: the directory cannot be read.
    """
    try:
        found = _native.shard_counts(str(data))
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    return found != [] and shards not in found
