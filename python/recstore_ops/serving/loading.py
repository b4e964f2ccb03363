"""Opens bundles."""

from __future__ import annotations

import os
from pathlib import Path

from recstore_ops.config.paths import user_path
from recstore_ops.serving.bundle import Bundle, open_bundle
from recstore_ops.serving.following.followed import FollowingBundle
from recstore_ops.serving.following.sources import PublisherAddress, source_of
from recstore_ops.serving.frozen_table import FrozenMemory
from recstore_ops.serving.manifest import Manifest


def load_bundle(
    directory: str | os.PathLike[str],
    *,
    memory: FrozenMemory = "mapped",
    compiled: bool = False,
    follow: str | os.PathLike[str] | PublisherAddress | None = None,
) -> Bundle:
    """Opens a bundle. No name of a table is taken: any tables may be open in the process, other bundles too.

    Args:
        directory: as `export` wrote it. Its files must not be changed in place as long as the bundle is in use.
        memory: of the tables, see `FrozenTable`.
        compiled: whether the program that AOTInductor compiled answers; its results may differ in their last bits.
        follow: a publication of the same model, by its directory, `host:port` of a publisher that serves it, a
            `PublisherAddress`, or `s3://bucket/prefix` of a copy in an object store. Tables and dense tensors are those
            of its newest step, and stay so; see `FollowingBundle`. A publication that cannot be read for a while is
            tried again.

    Raises:
        ValueError: there is no bundle or publication, one of another version, or a publication of another model; no
            compiled program, one for another release of torch or another kind of processor, or one that is to follow.
        OSError: a file is missing, cut off, changed, or of another bundle. Rows are looked at when they are first read,
            and `program.pt2` is compared by its size, and its content when it is read.
    """
    path = Path(user_path(directory, "directory"))
    if follow is not None and compiled:
        raise ValueError("a compiled program does not follow: give compiled or follow")
    manifest = Manifest.read(path)
    manifest.check_sizes(path)
    if follow is None:
        return open_bundle(path, manifest, memory, compiled=compiled)
    return FollowingBundle(path, manifest, source_of(follow), memory)
