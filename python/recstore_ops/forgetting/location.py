"""The interface of a place with rows to forget, whatever its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from recstore_ops.forgetting.id_set import IdSet, Match, are_certain
from recstore_ops.forgetting.report import Kind, Occurrence


@dataclass(frozen=True)
class Scan:
    """The ids that a place holds.

    Attributes:
        held: those that forgetting deletes.
        stays: those that it leaves.
        snapshots: the snapshots that it drops.
        seen: all snapshots of the place.
        is_unfinished: whether a save was cut off there, which may have left files of snapshots that are gone.
    """

    held: list[Occurrence] = field(default_factory=list)
    stays: list[Occurrence] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    is_unfinished: bool = False


class Location(Protocol):
    """A directory with tables, which is changed as a whole or not at all."""

    @property
    def path(self) -> Path:
        """The path of the place."""
        ...

    @property
    def kind(self) -> Kind:
        """The kind of the place."""
        ...

    def tables(self) -> set[str]:
        """Returns the names of its tables; raises RuntimeError or OSError if it is damaged."""
        ...

    def look(self, tables: Sequence[str], ids: IdSet) -> Scan:
        """Returns what it has of ids, and changes nothing; raises as `tables`."""
        ...

    def forget(self, tables: Sequence[str], ids: IdSet, look: Scan, progress: bool | None) -> tuple[int, int]:
        """Takes away what `look` has found. Returns the rows of the newest state that went, and the bytes written.

        Raises:
            RuntimeError, OSError: a file is damaged or cannot be written; the place is as it was.
        """
        ...

    def explained(self) -> set[Path]:
        """Returns the files that `look` reads by their format, or that cannot have ids."""
        ...


def held(place: Path | str, what: str, found: Match, *, is_certain: bool = True) -> list[Occurrence]:
    """Returns what was found somewhere, as a list of one, or of none."""
    ids = tuple(sorted(id for id, count in found.items() if count))
    return [Occurrence(place, what, ids, sum(found.values()), is_certain)] if ids else []


def held_perhaps(place: Path | str, what: str, found: Match) -> list[Occurrence]:
    """The same for numbers that may be ids by chance."""
    return held(place, what, found, is_certain=are_certain(found))


__all__ = ["Location", "Scan", "held", "held_perhaps"]
