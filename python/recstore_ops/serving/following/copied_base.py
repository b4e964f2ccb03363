"""A base that is copied from elsewhere, to be opened."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from recstore_ops.config.directory import Directory
from recstore_ops.serving.manifest import NAME as MANIFEST
from recstore_ops.serving.manifest import Manifest

MAX_MANIFEST_BYTES = 16 << 20


class Copy(Protocol):
    """Copies a file of a base, of at most so many bytes, to a directory.

    Raises:
        OSError: it is not there any more, cannot be read, or is larger.
    """

    def __call__(self, name: str, directory: Path, most: int, /) -> None: ...


@contextmanager
def copied_base(copy: Copy) -> Iterator[Directory]:
    """Gives a directory with the files of a base, which goes afterwards.

    Raises:
        OSError: a file cannot be copied, or the manifest is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="recstore-base-") as path, Directory(path) as directory:
        copy(MANIFEST, directory.path, MAX_MANIFEST_BYTES)
        manifest = Manifest.read(directory)
        directory.create_subdirectory("tables").close()
        sizes = {name: sums["bytes"] for name, sums in manifest.files.items()}
        for name in (*sizes, *(table.file for table in manifest.tables)):
            # The manifest does not say how large tables are: the room on the disk bounds them.
            free = shutil.disk_usage(path).free
            copy(name, directory.path, min(sizes.get(name, free), free))
        yield directory
