"""Bundles: frozen tables are written anew without the rows of ids, and the manifest is renamed over the one before."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from recstore_ops import _native
from recstore_ops.config.directory import Directory, check_name
from recstore_ops.forgetting.id_set import IdSet
from recstore_ops.forgetting.location import Scan, held
from recstore_ops.forgetting.report import Kind, Occurrence
from recstore_ops.ops import operators
from recstore_ops.serving.frozen_table import FrozenTable
from recstore_ops.serving.manifest import NAME, BundledTable, Manifest

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
        return {self.path / NAME, *(self.path / table.file for table in Manifest.read(self.path).tables)}

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
            directory.replace(NAME, made.read(NAME))


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


__all__ = ["BundlePlace"]
