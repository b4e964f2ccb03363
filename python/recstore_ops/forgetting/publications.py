"""Publications: base and updates are written anew without the ids, as another history, so that followers begin anew."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recstore_ops.config.directory import Directory
from recstore_ops.forgetting.bundles import BundlePlace
from recstore_ops.forgetting.id_set import IdSet, Match
from recstore_ops.forgetting.location import Scan, held
from recstore_ops.forgetting.report import Kind, Occurrence
from recstore_ops.serving.following.names import CURRENT, UPDATES
from recstore_ops.serving.following.publication import Current, Segment, names_in
from recstore_ops.serving.following.publication_files import PublicationFiles
from recstore_ops.serving.following.update import TableChanges, Update
from recstore_ops.serving.manifest import Manifest


@dataclass(frozen=True)
class PublicationPlace:
    """A publication whose publisher does not run. Its followers begin anew, and have the ids no longer.

    Attributes:
        path: the directory.
    """

    path: Path
    kind: Kind = "publication"

    def tables(self) -> set[str]:
        """Returns the names of its tables; raises OSError if it is damaged."""
        return BundlePlace(self.path / Current.read(self.path).base.name).tables()

    def look(self, tables: Sequence[str], ids: IdSet) -> Scan:
        """Returns what bases and updates have of ids; raises OSError if a file is damaged."""
        found: list[Occurrence] = []
        for stretch in self._stretches():
            found += BundlePlace(self.path / stretch.base.name).look(tables, ids).held
            for update in self._updates(stretch):
                found += held(self.path / update.name, "update", _of(update, tables, ids))
        return Scan(found)

    def forget(self, tables: Sequence[str], ids: IdSet, look: Scan, progress: bool | None) -> tuple[int, int]:
        """Writes base and updates anew; raises ValueError if a publisher runs."""
        if not look.held:
            return 0, 0
        with Directory(self.path) as directory:
            directory.check_plain(below=True)
        files, history = PublicationFiles(self.path), uuid.uuid4().hex[:8]
        written = [0, 0]

        def write_base(before: Path, after: Path) -> None:
            _link(before, after)
            place = BundlePlace(after)
            written[:] = place.forget(tables, ids, place.look(tables, ids), progress)

        try:
            assert files.current is not None, "it has been looked at"
            newest = files.current.stretches()[0]
            updates = [_without(update, history, tables, ids) for update in self._updates(newest)]
            files.begin_history(history, write_base, updates)
        finally:
            files.close()
        return written[0], written[1] + sum((self.path / update.name).stat().st_size for update in updates)

    def explained(self) -> set[Path]:
        """Returns what the publication says, and all that it says there is."""
        files = {self.path / CURRENT}
        for stretch in self._stretches():
            files |= BundlePlace(self.path / stretch.base.name).explained()
            files |= {self.path / name for name in self._names(stretch)}
        return files

    def _stretches(self) -> list[Segment]:
        """The bases that are there, each with its updates."""
        there = Current.read(self.path).stretches()
        with Directory(self.path) as directory:
            return [stretch for stretch in there if directory.kind(stretch.base.name) is not None]

    def _names(self, stretch: Segment) -> list[str]:
        """The updates that are there, in their order."""
        with Directory(self.path) as directory:
            names = [name for name in names_in(directory) if name.folder == UPDATES and stretch.has(name)]
        return list(map(str, sorted(names, key=lambda name: name.number)))

    def _updates(self, stretch: Segment) -> Iterator[Update]:
        for name in self._names(stretch):
            with Directory(self.path) as directory:
                yield Update.from_bytes(directory.read(name), name)


def _link(before: Path, after: Path) -> None:
    """Makes a bundle of the files of another one, which stay one with those.

    Raises:
        OSError: one of them is no regular file.
    """
    names = Manifest.read(before).names()
    (after / "tables").mkdir(parents=True)
    with Directory(after) as made:
        for name in sorted(names):
            os.link(before / name, after / name, follow_symlinks=False)
            made.open(name).close()


def _of(update: Update, tables: Sequence[str], ids: IdSet) -> Match:
    named = [changes for name, changes in update.tables.items() if name in tables]
    return sum((ids.among(_ids(part)) for each in named for part in (each.ids, each.deleted)), Match())


def _without(update: Update, history: str, tables: Sequence[str], ids: IdSet) -> Update:
    kept: Mapping[str, TableChanges] = {
        name: _kept(changes, ids) if name in tables else changes for name, changes in update.tables.items()
    }
    return replace(update, history=history, tables=kept)


def _kept(changes: TableChanges, ids: IdSet) -> TableChanges:
    own, deleted = _ids(changes.ids), _ids(changes.deleted)
    stay = ~np.isin(own, ids.values)
    rows = np.frombuffer(changes.rows, np.uint8).reshape(len(own), -1) if len(own) else np.empty((0, 0), np.uint8)
    return TableChanges(own[stay].tobytes(), rows[stay].tobytes(), deleted[~np.isin(deleted, ids.values)].tobytes())


def _ids(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, "<i8")


__all__ = ["PublicationPlace"]
