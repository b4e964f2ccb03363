"""The manifest of a checkpoint's directory, read and written without its tables; see `docs/checkpoint_format.md`."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from recstore_ops.config.directory import Directory

MANIFEST = "manifest.json"
LOCK = ".lock"

_FORMAT = "recstore-checkpoint"
_VERSION = 1
_BEFORE_CHECKSUM = b'"checksum": "'
_NO_CHECKSUM = "00000000"
_FILE_NAME = re.compile(r"[^/\\]+\.safetensors(\.zst)?")
_KEYS_OF_MANIFEST = {"format", "version", "snapshots", "checksum"}
_KEYS_OF_SNAPSHOT = {"id", "parent", "created", "metadata", "tables"}


@dataclass(frozen=True)
class Manifest:
    """The snapshots of a directory.

    Attributes:
        directory: where it is, held open.
        text: the file's bytes.
        snapshots: the oldest first, as the file has them.
    """

    directory: Directory
    text: bytes
    snapshots: list[dict[str, Any]]

    def files(self) -> dict[str, dict[str, Any]]:
        """The entries of all files, by name."""
        return {file["file"]: file for snapshot in self.snapshots for file in files_of(snapshot)}

    def gaps(self) -> list[str]:
        """The parents that are missing, each in a sentence."""
        ids = {snapshot["id"] for snapshot in self.snapshots}
        missing = [snapshot for snapshot in self.snapshots if snapshot["parent"] not in {None, *ids}]
        return [f"the snapshot {found['id']} follows {found['parent']}, which is missing" for found in missing]


def files_of(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of a snapshot's own files."""
    for table in snapshot["tables"]:
        yield from table["shards"]


def read_manifest(directory: str) -> Manifest:
    """Reads the manifest of a directory and checks it.

    Raises:
        RuntimeError: there is no checkpoint, or the manifest is not what it should be; names the file.
    """
    path = f"{directory}/{MANIFEST}"
    try:
        held = Directory(directory)
        text = held.read(MANIFEST)
        document = json.loads(text)
    except FileNotFoundError:
        raise RuntimeError(f"checkpoint: {directory}: there is no checkpoint here") from None
    except OSError as error:
        raise RuntimeError(f"checkpoint: {error.filename}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"checkpoint: {path}: {error}") from None
    try:
        _check(document, text)
    except (KeyError, TypeError, AttributeError):
        raise RuntimeError(f"checkpoint: {path}: it is no manifest of a checkpoint") from None
    except ValueError as error:
        raise RuntimeError(f"checkpoint: {path}: {error}") from None
    return Manifest(held, text, document["snapshots"])


def _check(document: dict[str, Any], text: bytes) -> None:
    if document.keys() != _KEYS_OF_MANIFEST or document["format"] != _FORMAT:
        raise ValueError("it is no manifest of a checkpoint")
    if document["version"] != _VERSION:
        raise ValueError(f"this release reads version {_VERSION}, the checkpoint has {document['version']}")
    if _checksum_of(text) != document["checksum"]:
        raise ValueError("it was changed: its checksum is another")
    for snapshot in document["snapshots"]:
        if snapshot.keys() != _KEYS_OF_SNAPSHOT:
            raise KeyError
        for file in files_of(snapshot):
            if not _FILE_NAME.fullmatch(file["file"]):
                raise ValueError(f'"{file["file"]}" is not the name of a file of a checkpoint')
            _ = file["bytes"] + file["rows"] + file["deleted"] + sum(file["checksums"].values())


def _checksum_of(text: bytes) -> str | None:
    """The checksum that a manifest should have; none if there is no place for one."""
    place = text.rfind(_BEFORE_CHECKSUM)
    begin = place + len(_BEFORE_CHECKSUM)
    if place < 0 or len(text) < begin + len(_NO_CHECKSUM):
        return None
    return f"{zlib.crc32(text[:begin] + _NO_CHECKSUM.encode() + text[begin + len(_NO_CHECKSUM) :]):08x}"


def write_manifest(directory: Directory, snapshots: list[dict[str, Any]]) -> None:
    """Puts a manifest of these snapshots in the place of the directory's: readers see the old one or this one.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    document = {"format": _FORMAT, "version": _VERSION, "snapshots": snapshots, "checksum": _NO_CHECKSUM}
    unsigned = json.dumps(document, indent=2).encode()
    document["checksum"] = _checksum_of(unsigned)
    directory.replace(MANIFEST, json.dumps(document, indent=2).encode())


@contextmanager
def locked(directory: str) -> Iterator[None]:
    """Keeps others from saving to a directory.

    Raises:
        RuntimeError: somebody saves to it.
        OSError: the directory cannot be written.
    """
    try:
        lock = Directory(directory).lock(LOCK)
    except BlockingIOError:
        raise RuntimeError(f"checkpoint: {directory}: another process or store is saving to it") from None
    with lock:
        yield


__all__ = ["LOCK", "MANIFEST", "Manifest", "files_of", "locked", "read_manifest", "write_manifest"]
