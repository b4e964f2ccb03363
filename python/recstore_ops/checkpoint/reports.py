"""What saves and loads of checkpoints return."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote.

    Attributes:
        snapshot: the snapshot's name.
        is_delta: whether it tells changes only.
        rows: the rows written.
        deleted: the ids told to be deleted.
        bytes: the bytes written.
    """

    snapshot: str
    is_delta: bool
    rows: int
    deleted: int
    bytes: int


@dataclass(frozen=True)
class LoadReport:
    """What a load read.

    Attributes:
        snapshot: the snapshot's name.
        metadata: what its save was given along.
        tables: the rows of each table, by name.
    """

    snapshot: str
    metadata: Any
    tables: dict[str, int]
