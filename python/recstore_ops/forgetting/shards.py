"""The directory of a server that does not run: a checkpoint, or a checkpoint and the log behind it."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import lexists
from pathlib import Path
from typing import Any, BinaryIO

from recstore_ops import _native
from recstore_ops.checkpoint.manifest import LOCK, MANIFEST, read_manifest
from recstore_ops.checkpoint.progress import shown
from recstore_ops.config.directory import Directory
from recstore_ops.forgetting.checkpoints import explained_by, left_out, look_at_checkpoint, unfinished
from recstore_ops.forgetting.id_set import IdSet
from recstore_ops.forgetting.place import Look, held_perhaps
from recstore_ops.forgetting.report import Held, Kind

SHARD = "recstore-shard.json"
SHARD_NAME = re.compile(r"shard-\d+-of-\d+")

_LOCK = "lock"
_CHECKPOINT, _LOG = "checkpoint", "log"
_OPENED = re.compile(rb'"verb":"open_table","name":("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class ShardPlace:
    """The directory of one shard. A checkpoint without the ids takes the place of all there is.

    Attributes:
        path: the directory.
    """

    path: Path
    kind: Kind = "server"

    def tables(self) -> set[str]:
        """Returns the names of the tables of all snapshots, and of those that the log has opened since.

        Raises:
            ValueError: a server uses the directory, or it has not been its leader's.
            OSError: something in it is a link, or neither file nor directory.
            RuntimeError: a file is damaged.
        """
        with Directory(self.path) as directory:
            directory.check_plain(below=True)
            check_unused(directory)
            _check_leads(directory)
        names = {name for path in self._logs() for name in _opened_in(path)}
        if self._has_checkpoint():
            snapshots = read_manifest(str(self._checkpoint())).snapshots
            names |= {table["name"] for snapshot in snapshots for table in snapshot["tables"]}
        return names

    def look(self, tables: Sequence[str], ids: IdSet) -> Look:
        """Returns what checkpoint and log have of ids; raises RuntimeError where a file is damaged.

        A log is searched byte by byte: what was cut off in it has ids that no record names.
        """
        manifest = read_manifest(str(self._checkpoint())) if self._has_checkpoint() else None
        look = Look() if manifest is None else look_at_checkpoint(manifest, tables, ids)
        look.held.extend(found for path in self._logs() for found in _in_log(path, ids))
        return look

    def forget(self, tables: Sequence[str], ids: IdSet, look: Look, progress: bool | None) -> tuple[int, int]:
        """Takes away what `look` has found."""
        if not look.held and not unfinished(self._checkpoint()):
            return 0, 0
        with shown("forgetting", progress) as native:
            return _native.forget_in_shard(str(self.path), left_out(tables, ids, look), native)

    def explained(self) -> set[Path]:
        """Returns the files of checkpoint and log, and those with which servers tell who they are."""
        own = {self.path / name for name in (SHARD, _LOCK, "incarnation")}
        of_checkpoint = {self._checkpoint() / LOCK}
        if self._has_checkpoint():
            of_checkpoint |= explained_by(read_manifest(str(self._checkpoint())))
        return own | of_checkpoint | set(self._logs())

    def _checkpoint(self) -> Path:
        return self.path if lexists(self.path / MANIFEST) else self.path / _CHECKPOINT

    def _has_checkpoint(self) -> bool:
        return lexists(self._checkpoint() / MANIFEST)

    def _logs(self) -> list[Path]:
        return sorted((self.path / _LOG).glob("*.log"))


def is_shard(path: Path) -> bool:
    """Whether a directory is that of a server."""
    has_tables = any(lexists(path / name) for name in (MANIFEST, f"{_CHECKPOINT}/{MANIFEST}", _LOG))
    return lexists(path / SHARD) or (SHARD_NAME.fullmatch(path.name) is not None and has_tables)


def check_unused(directory: Directory) -> None:
    """Checks that no server uses a directory.

    Raises:
        ValueError: one does.
    """
    if directory.kind(_LOCK) is None:
        return
    try:
        directory.lock(_LOCK).release()
    except BlockingIOError:
        message = "a server uses the directory: end it first, or have the server itself forget, with --servers"
        raise ValueError(f"{directory.path}: {message}") from None


def _check_leads(directory: Directory) -> None:
    path, told = directory.path, _told(directory)
    role = told.get("standing", {}).get("role", "leader")
    if isinstance(role, dict) and "follower" in role:
        leader = role["follower"]["leader"]
        raise ValueError(f"{path}: it is a copy of the shard at {leader}: forget there, and it follows")
    if role == "demoted":
        raise ValueError(f"{path}: another server leads its shard: start it anew with --follow, or remove it")


def _told(directory: Directory) -> dict[str, Any]:
    try:
        told = json.loads(directory.read(SHARD))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{directory.path / SHARD}: {error}") from None
    if not isinstance(told, dict):
        raise ValueError(f"{directory.path / SHARD}: expected an object, got {type(told).__name__}")
    return told


def _opened_in(path: Path) -> set[str]:
    """The names of the tables that the changes of a log open."""
    with _open_log(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return set()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return {json.loads(name) for name in _OPENED.findall(content)}


def _in_log(path: Path, ids: IdSet) -> list[Held]:
    with _open_log(path) as file:
        return held_perhaps(path, "log", ids.within(file))


def _open_log(path: Path) -> BinaryIO:
    with Directory(path.parent.parent) as shard, shard.subdirectory(_LOG) as log:
        return log.open(path.name)


__all__ = ["SHARD", "SHARD_NAME", "ShardPlace", "check_unused", "is_shard"]
