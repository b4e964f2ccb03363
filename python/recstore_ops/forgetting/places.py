"""Finds the places in a user's directories, each kind by its own files; anything else is refused."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from os.path import lexists
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recstore_ops import _native
from recstore_ops.checkpoint.arguments import checked_directory
from recstore_ops.checkpoint.progress import shown
from recstore_ops.config.directory import Directory, check_name
from recstore_ops.forgetting.id_set import IdSet, Match, are_certain
from recstore_ops.forgetting.report import SKETCHED, Kind, Location, Occurrence, Scan, held, held_perhaps
from recstore_ops.ops import operators
from recstore_ops.serving.following.names import CURRENT, UPDATES
from recstore_ops.serving.following.publication import Current, Segment, names_in
from recstore_ops.serving.following.publication_files import PublicationFiles
from recstore_ops.serving.following.update import TableChanges, Update
from recstore_ops.serving.frozen_table import FrozenTable
from recstore_ops.serving.manifest import NAME as MANIFEST
from recstore_ops.serving.manifest import BundledTable, Manifest

_NOTE = "forgetting-unfinished.json"
_FORMAT, _VERSION = "recstore bundle unfinished", 1


@dataclass(frozen=True)
class BundlePlace:
    """A bundle. Processes that have it open keep the rows until they open it anew.

    Attributes:
        path: the directory.
    """

    path: Path
    kind: Kind = "bundle"

    def tables(self) -> set[str]:
        """Returns the names of its tables; raises OSError if the manifest is damaged."""
        return {table.name for table in Manifest.read(self.path).tables}

    def look(self, tables: Sequence[str], ids: IdSet) -> Scan:
        """Returns the rows that its tables have of ids; raises OSError if a file is damaged."""
        return Scan([found for table in self._named(tables) for found in self._of(table, ids)])

    def forget(self, tables: Sequence[str], ids: IdSet, look: Scan, progress: bool | None) -> tuple[int, int]:
        """Writes the tables that have rows of the ids anew."""
        with Directory(self.path) as directory:
            directory.check_plain(below=True)
        _remove_unneeded(self.path)
        files = {found.place for found in look.held}
        changed = [table for table in self._named(tables) if self.path / table.file in files]
        if not changed:
            return 0, 0
        note, written = _Note.begin(self.path), {}
        rows = size = 0
        for table in changed:
            written[table.file], removed, table_bytes = _written(self.path, table, ids, note)
            rows, size = rows + removed, size + table_bytes
        # Only after all new files are on the disk. The old ones go once the manifest no longer lists them.
        note.add([table.file for table in changed])
        _replace_manifest(self.path, written)
        _remove_unneeded(self.path)
        return rows, size

    def explained(self) -> set[Path]:
        """Returns the tables that the manifest lists, and the manifest."""
        return {self.path / MANIFEST, *(self.path / table.file for table in Manifest.read(self.path).tables)}

    def _named(self, tables: Sequence[str]) -> list[BundledTable]:
        return [table for table in Manifest.read(self.path).tables if table.name in tables]

    def _of(self, table: BundledTable, ids: IdSet) -> list[Occurrence]:
        path = self.path / table.file
        frozen = FrozenTable(path)
        if frozen.fingerprint != table.fingerprint:
            raise OSError(f"{path} is not of this bundle: its fingerprint is another")
        return held(path, "rows", ids.among(operators.hashtable_ids(frozen.handle).numpy()))


def _written(path: Path, table: BundledTable, ids: IdSet, note: _Note) -> tuple[BundledTable, int, int]:
    """Writes a table beside the one before, under the next number."""
    numbers = [int(file.stem) for file in (path / "tables").glob("*.safetensors") if file.stem.isdecimal()]
    file = f"tables/{max(numbers, default=0) + 1}.safetensors"
    # Before the file is there: if this process is killed, the next one finds it by the note.
    note.add([file])
    rows, size = _native.freeze_table_without(str(path / table.file), str(path / file), list(ids))
    with Directory(path / "tables") as directory:
        directory.sync()
    return replace(table, file=file, fingerprint=FrozenTable(path / file).fingerprint), rows, size


def _replace_manifest(path: Path, written: dict[str, BundledTable]) -> None:
    manifest = Manifest.read(path)
    tables = tuple(written.get(table.file, table) for table in manifest.tables)
    with tempfile.TemporaryDirectory(dir=path, prefix=".forgetting.") as beside:
        replace(manifest, tables=tables).write(Path(beside))
        with Directory(beside) as made, Directory(path) as directory:
            directory.replace(MANIFEST, made.read(MANIFEST))


@dataclass
class _Note:
    """The files that are not needed if what goes on is cut off, or once it has ended: written before they are there."""

    directory: Path
    files: list[str]

    @classmethod
    def begin(cls, directory: Path) -> _Note:
        return cls(directory, [])

    def add(self, files: Sequence[str]) -> None:
        self.files.extend(files)
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "files": self.files})
        with Directory(self.directory) as directory:
            directory.replace(_NOTE, text.encode())


def _remove_unneeded(path: Path) -> None:
    """Removes the files that a note lists and the manifest does not, and then the note."""
    needed = {table.file for table in Manifest.read(path).tables}
    with Directory(path) as directory:
        for name in (name for name in _noted(directory) if name not in needed):
            with suppress(FileNotFoundError):
                directory.remove_file(name)
        with suppress(FileNotFoundError):
            directory.remove_file(_NOTE)
        directory.sync()


def _noted(directory: Directory) -> Iterator[str]:
    try:
        note = json.loads(directory.read(_NOTE))
    except (FileNotFoundError, ValueError, RecursionError):
        return
    if isinstance(note, dict) and (note.get("format"), note.get("version")) == (_FORMAT, _VERSION):
        for name in note["files"]:
            check_name(name, directory.path / _NOTE)
            if name.startswith("tables/"):
                yield name


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
        # Another history: followers of the present one have taken the ids already, and so begin anew.
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
            # A hard link of a symbolic link is one too. Opening refuses it.
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
    # Without rows numpy cannot find the size that -1 stands for.
    rows = np.frombuffer(changes.rows, np.uint8).reshape(len(own), -1) if len(own) else np.empty((0, 0), np.uint8)
    return TableChanges(own[stay].tobytes(), rows[stay].tobytes(), deleted[~np.isin(deleted, ids.values)].tobytes())


def _ids(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, "<i8")


@dataclass(frozen=True)
class StorePlace:
    """A directory of snapshots, or of one server, with or without a log.

    The snapshots that have ids go; a full one without them takes the place of the newest, and of the log.

    Attributes:
        path: the directory.
        kind: which of the two.
    """

    path: Path
    kind: Kind

    def tables(self) -> set[str]:
        """Returns the names of the tables of all snapshots, and of those that a log has opened since.

        Raises:
            ValueError: a server uses the directory, or it has not been its leader's.
            OSError: something in a server's directory is a link, or neither file nor directory.
            RuntimeError: a file is damaged.
        """
        if self.kind == "server":
            with Directory(self.path) as directory:
                directory.check_plain(below=True)
        return set(_native.tables_in(str(self.path))["tables"])

    def look(self, tables: Sequence[str], ids: IdSet) -> Scan:
        """Returns what snapshots and log have of ids; raises RuntimeError if a file is damaged."""
        native = _native.ids_in(str(self.path), list(tables), list(ids))
        look = Scan(snapshots=native["holding"], seen=native["snapshots"], is_unfinished=native["unfinished"])
        for each in native["held"]:
            found = Match(dict(each["ids"]))
            # The counters of a sketch may be those of other ids, and what is in a log is searched byte by byte.
            is_certain = are_certain(found) if each["what"] == "log" else each["what"] != SKETCHED
            look.held.extend(held(self.path / each["file"], each["what"], found, is_certain=is_certain))
        for snapshot, metadata in native["metadata"]:
            found, where = ids.in_text(metadata.encode()), f"metadata of snapshot {snapshot}"
            look.stays.extend(held_perhaps(self.path / native["manifest"], where, found))
        return look

    def forget(self, tables: Sequence[str], ids: IdSet, look: Scan, progress: bool | None) -> tuple[int, int]:
        """Removes the ids that `look` found, and the remains of a save that was cut off."""
        if not look.held and not look.is_unfinished:
            return 0, 0
        left = {"tables": list(tables), "ids": list(ids), "snapshots": look.seen, "holding": look.snapshots}
        with shown("forgetting", progress) as native:
            return _native.delete_ids(str(self.path), left, native)

    def explained(self) -> set[Path]:
        """Returns the files of snapshots and log, and those that cannot have ids."""
        return {self.path / file for file in _native.tables_in(str(self.path))["files"]}


_CHECKPOINT_FORMAT, _BUNDLE_FORMAT = "recstore-checkpoint", "recstore bundle"
_OF_RUN = ("checkpoint", "best")
"""The checkpoints of a run of `recstore train`."""


def find_places(paths: Iterable[str | PathLike[str]]) -> list[Location]:
    """Returns the places that directories are, or have; each once.

    Raises:
        ValueError: one is the URL of an object store, is not there, or is something else.
    """
    found: dict[Path, Location] = {}
    for path in paths:
        for place in _places_at(Path(checked_directory(path, "forget"))):
            found.setdefault(place.path.resolve(), place)
    return list(found.values())


def places_below(directories: Iterable[Path], known: set[Path]) -> list[Location]:
    """Returns the checkpoints and bundles anywhere below directories, but for those whose manifest is known.

    Their files say of which table an id is. A manifest that is damaged is a file like others.
    """
    found: dict[Path, Location] = {}
    for manifest in (path for directory in directories for path in directory.rglob(MANIFEST)):
        if manifest.is_file() and manifest.resolve() not in known:
            with suppress(ValueError, OSError):
                kind = {_BUNDLE_FORMAT: BundlePlace, _CHECKPOINT_FORMAT: _checkpoint}.get(_format_of(manifest))
                if kind is not None:
                    found.setdefault(manifest.resolve(), kind(manifest.parent))
    return list(found.values())


def _places_at(path: Path) -> list[Location]:
    if not path.is_dir():
        raise ValueError(f"{path} is no directory" if path.exists() else f"there is no directory {path}")
    # First, for the directory of a server can have a manifest too.
    if _native.is_server_directory(path):
        return [StorePlace(path, "server")]
    if lexists(path / CURRENT):
        Current.read(path)
        return [PublicationPlace(path)]
    if lexists(path / MANIFEST):
        return [_with_manifest(path)]
    if lexists(path / "config.json") and (saved := _checkpoints_of_run(path)):
        return saved
    if servers := [StorePlace(each, "server") for each in sorted(path.iterdir()) if _native.is_server_directory(each)]:
        return list(servers)
    raise ValueError(
        f"{path} is no checkpoint, no run of `recstore train` with a checkpoint, no --data of servers, no bundle and "
        "no publication"
    )


def _with_manifest(path: Path) -> Location:
    format = _format_of(path / MANIFEST)
    if format == _BUNDLE_FORMAT:
        return BundlePlace(path)
    if format != _CHECKPOINT_FORMAT:
        raise ValueError(f"{path / MANIFEST} is the manifest of no checkpoint and no bundle")
    if _native.is_server_directory(path.absolute().parent):
        raise ValueError(f"{path} belongs to a server, which has a log beside it: name {path.absolute().parent}")
    return _checkpoint(path)


def _format_of(path: Path) -> str:
    try:
        with Directory(path.parent) as directory:
            return str(json.loads(directory.read(path.name)).get("format"))
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: it is no manifest of a checkpoint or a bundle") from None


def _checkpoints_of_run(path: Path) -> list[Location]:
    return [_checkpoint(path / name) for name in _OF_RUN if lexists(path / name / MANIFEST)]


def _checkpoint(path: Path) -> StorePlace:
    return StorePlace(path, "checkpoint")


__all__ = ["BundlePlace", "PublicationPlace", "StorePlace", "find_places", "places_below"]
