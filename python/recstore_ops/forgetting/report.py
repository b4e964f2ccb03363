"""The results of forgetting ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from recstore_ops.forgetting.id_set import IdSet, Match, are_certain


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


__all__ = ["SKETCHED", "ForgetReport", "Kind", "Location", "Occurrence", "PlaceReport", "Scan", "held", "held_perhaps"]
