"""The manifest of a checkpoint's directory, read without its tables; see `docs/checkpoint_format.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recstore_ops import _native
from recstore_ops.config.directory import Directory

MANIFEST = "manifest.json"
LOCK = ".lock"


@dataclass(frozen=True)
class Manifest:
    """The snapshots of a directory.

    Attributes:
        directory: where it is, held open.
        snapshots: the oldest first, as the file has them.
    """

    directory: Directory
    snapshots: list[dict[str, Any]]

    def files(self) -> dict[str, dict[str, Any]]:
        """The entries of all files, by name."""
        return {file["file"]: file for snapshot in self.snapshots for file in files_of(snapshot)}


def files_of(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of a snapshot's own files."""
    for table in snapshot["tables"]:
        yield from table["shards"]


def read_manifest(directory: str) -> Manifest:
    """Reads the manifest of a directory and checks it.

    Raises:
        RuntimeError: there is no checkpoint, or the manifest is not what it should be; names the file.
    """
    snapshots = _native.manifest(directory)
    return Manifest(Directory(directory), snapshots)


__all__ = ["LOCK", "MANIFEST", "Manifest", "read_manifest"]
