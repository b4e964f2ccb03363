"""Publications: base and updates are written anew without the ids, as another history, so that followers begin anew."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recstore_ops.config.directory import Directory
from recstore_ops.forgetting.bundles import BundlePlace
from recstore_ops.forgetting.id_set import Found, IdSet
from recstore_ops.forgetting.place import Look, held
from recstore_ops.forgetting.report import Held, Kind
from recstore_ops.serving.following.publication import CURRENT, Base, Current, TableChanges, Update, update_name
from recstore_ops.serving.following.publication_files import PublicationFiles


@dataclass(frozen=True)
class PublicationPlace:
    """A publication whose publisher does not run. Its followers begin anew, and have the ids no longer.

    Attributes:
        path: the directory.
    """

    path: Path
    kind: Kind = "publication"

    def tables(self) -> set[str]:
        """Returns the names of its tables; raises OSError where it is damaged."""
        return BundlePlace(self.path / Current.read(self.path).base.name).tables()

    def look(self, tables: Sequence[str], ids: IdSet) -> Look:
        """Returns what bases and updates have of ids; raises OSError where a file is damaged."""
        found: list[Held] = []
        for base, last in self._bases():
            found += BundlePlace(self.path / base.name).look(tables, ids).held
            for update in self._updates(base, last):
                found += held(self.path / update.name, "update", _of(update, tables, ids))
        return Look(found)

    def forget(self, tables: Sequence[str], ids: IdSet, look: Look, progress: bool | None) -> tuple[int, int]:
        """Writes base and updates anew; raises ValueError where a publisher runs."""
        if not look.held:
            return 0, 0
        with Directory(self.path) as directory:
            directory.check_plain(below=True)
        files, history = PublicationFiles(self.path), uuid.uuid4().hex[:8]
        written = [0, 0]

        def write_base(before: Path, after: Path) -> None:
            shutil.copytree(before, after, copy_function=os.link)  # by path: looked through, without links
            place = BundlePlace(after)
            written[:] = place.forget(tables, ids, place.look(tables, ids), progress)

        try:
            assert files.current is not None, "it has been looked at"
            base, last = files.current.base, files.current.update
            updates = [_without(update, history, tables, ids) for update in self._updates(base, last)]
            files.begin_history(history, write_base, updates)
        finally:
            files.close()
        return written[0], written[1] + sum((self.path / update.name).stat().st_size for update in updates)

    def explained(self) -> set[Path]:
        """Returns what the publication says, and all that it says there is."""
        files = {self.path / CURRENT}
        for base, last in self._bases():
            files |= BundlePlace(self.path / base.name).explained()
            files |= {self.path / update_name(base.history, number) for number in range(base.after + 1, last + 1)}
        return files

    def _bases(self) -> list[tuple[Base, int]]:
        """The bases, each with the last update behind it."""
        current = Current.read(self.path)
        there = [(current.base, current.update), *([] if current.previous is None else [current.previous])]
        return [(base, last) for base, last in there if (self.path / base.name).exists()]

    def _updates(self, base: Base, last: int) -> Iterator[Update]:
        for number in range(base.after + 1, last + 1):
            name = update_name(base.history, number)
            if (self.path / name).exists():
                with Directory(self.path) as directory:
                    yield Update.from_bytes(directory.read(name), name)


def _of(update: Update, tables: Sequence[str], ids: IdSet) -> Found:
    named = [changes for name, changes in update.tables.items() if name in tables]
    return sum((ids.among(_ids(part)) for each in named for part in (each.ids, each.deleted)), Found())


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
