"""The results of forgetting ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SKETCHED = "a sketch"
"""The form in which ids are held whose counters are above zero; other ids may have caused that."""

Kind = Literal["checkpoint", "server", "bundle", "publication", "servers"]


@dataclass(frozen=True)
class Occurrence:
    """Ids that a file, or a table on servers, has.

    Attributes:
        place: the file; of servers the table.
        what: the form in which it has them: `rows`, `deleted ids`, `counts`, `rows chosen to leave`, `a sketch`, `log`;
            or the place of a find: `text`, `a tensor`, a column; or the reason why the file could not be read.
        ids: the ids, ascending; empty if the file could not be read.
        occurrences: how often.
        is_certain: whether these are certainly the ids. Below 2^31 a number may be there by chance, unless the file's
            format marks it as an id; the counters of a sketch may belong to other ids.
    """

    place: Path | str
    what: str
    ids: tuple[int, ...]
    occurrences: int
    is_certain: bool = True

    def __str__(self) -> str:
        verb = "holds" if self.is_certain else "may hold"
        if not self.ids:
            return f"{self.place} {verb} the ids: {self.what}"
        times = "once" if self.occurrences == 1 else f"{self.occurrences:,} times"
        return f"{self.place} {verb} {_shown(self.ids)}, {times}: {self.what}"


def _shown(ids: tuple[int, ...], most: int = 5) -> str:
    more = f" and {len(ids) - most:,} more" if len(ids) > most else ""
    return ", ".join(map(str, ids[:most])) + more


@dataclass(frozen=True)
class PlaceReport:
    """The result of forgetting in one checkpoint, shard or bundle, or on servers.

    Attributes:
        place: its directory, or the addresses of the servers.
        kind: what it is.
        held: what it had of the ids.
        snapshots: those that are dropped: they had the ids, or followed one that had.
        rows: how many the newest state had of the ids; 0 in a `dry_run`, as the next.
        bytes: written, of what took the place of files with the ids.
    """

    place: Path | str
    kind: Kind
    held: list[Occurrence] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        if not self.held:
            return f"{self.place}, {self.kind}: holds none of the ids"
        what = f"{self.rows:,} rows removed, {len(self.snapshots):,} snapshots dropped, {self.bytes:,} bytes written"
        return f"{self.place}, {self.kind}: {what}"


@dataclass(frozen=True)
class ForgetReport:
    """The result of `forget`.

    Attributes:
        tables: those whose rows were to go.
        ids: which, ascending, each once.
        dry_run: whether nothing was changed.
        places: the checkpoints, shards, bundles and servers.
        not_found: the ids that none of them had.
        remaining: what still holds ids, or may: files that `forget` does not change.
    """

    __module__ = "recstore_ops"

    tables: tuple[str, ...]
    ids: tuple[int, ...]
    dry_run: bool
    places: list[PlaceReport]
    not_found: tuple[int, ...]
    remaining: list[Occurrence]

    @property
    def is_forgotten(self) -> bool:
        """Whether nothing that was looked at holds or may hold the ids, beyond what was removed or would be."""
        return not self.remaining


__all__ = ["SKETCHED", "ForgetReport", "Kind", "Occurrence", "PlaceReport"]
