"""A second directory with the files of a checkpoint, which stay when the first goes on."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from recstore_ops.config.directory import Directory

MANIFEST = "manifest.json"

_FORMAT, _VERSION = "recstore-unfinished", 1
_NOTE = "-unfinished.json"


def mirror_checkpoint(source: Path, target: Path) -> None:
    """Makes `target` hold what the checkpoint directory `source` does, by hard links where the file system has them.

    Files of a checkpoint never change, and the manifest is replaced in one move: `target` holds its old checkpoint or
    the new one, whenever this ends. What it lists no longer is removed, and nothing else. Nobody else may write to
    either meanwhile.

    Raises:
        OSError: a file cannot be read or written, or is none.
    """
    with Directory(source.parent) as run, run.subdirectory(source.name) as old, Directory(target.parent) as run:
        _mirror(old, run.create_subdirectory(target.name))


def _mirror(source: Directory, target: Directory) -> None:
    _remove_unneeded(target)
    files, before = files_of(source), files_of(target)
    note = f"{secrets.token_hex(8)}{_NOTE}"
    target.replace(note, json.dumps({"format": _FORMAT, "version": _VERSION, "files": sorted(files ^ before)}).encode())
    for name in sorted(files - before):
        _link(source, target, name)
    target.replace(MANIFEST, source.read(MANIFEST))
    _remove_unneeded(target)


def snapshots_of(directory: Directory) -> list[dict[str, Any]]:
    """The snapshots of a run's checkpoint directory, the newest last; none where no save has ended yet.

    Raises:
        OSError: the manifest is damaged.
    """
    try:
        text = directory.read(MANIFEST)
    except FileNotFoundError:
        return []
    try:
        return json.loads(text)["snapshots"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OSError(f"{directory.path / MANIFEST} is damaged: it tells no snapshots") from None


def files_of(directory: Directory) -> set[str]:
    """The names of the files that the manifest of a run's checkpoint directory lists.

    Raises:
        OSError: the manifest is damaged.
    """
    try:
        return {name for snapshot in snapshots_of(directory) for name in _files_of(snapshot)}
    except (KeyError, TypeError):
        raise OSError(f"{directory.path / MANIFEST} is damaged: it does not tell its files") from None


def _files_of(snapshot: dict[str, Any]) -> Iterator[str]:
    yield str(snapshot["metadata"]["dense"])
    for table in snapshot["tables"]:
        yield from (str(shard["file"]) for shard in table["shards"])


def _remove_unneeded(directory: Directory) -> None:
    """Removes what notes list and the manifest does not, and then the notes."""
    notes = [(name, _noted(directory, name)) for name in directory.names() if name.endswith(_NOTE)]
    needed = files_of(directory)
    for note, files in notes:
        if files is None:
            continue
        for name in files - needed:
            with suppress(FileNotFoundError):
                directory.remove_file(name)
        directory.remove_file(note)
    directory.sync()


def _noted(directory: Directory, name: str) -> set[str] | None:
    """The files that a note lists; None where a file only has the name of one."""
    try:
        note = json.loads(directory.read(name))
        return set(note["files"]) if (note["format"], note["version"]) == (_FORMAT, _VERSION) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _link(source: Directory, target: Directory, name: str) -> None:
    try:
        source.link(name, target)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links. Until the manifest lists it, it may lack some of its content.
        with source.open(name) as content, target.create_new(name) as copy:
            shutil.copyfileobj(content, copy)
            os.fsync(copy.fileno())
