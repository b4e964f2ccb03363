"""Opens bundles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from recstore_ops.config.paths import user_path
from recstore_ops.serving.bundle import Bundle, open_bundle
from recstore_ops.serving.following.followed import FollowingBundle
from recstore_ops.serving.following.sources import PublisherAddress, source_of
from recstore_ops.serving.frozen_table import FrozenMemory
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.opening import BundleFiles


def load_bundle(
    directory: str | os.PathLike[str],
    *,
    memory: FrozenMemory = "mapped",
    compiled: bool = False,
    follow: str | os.PathLike[str] | PublisherAddress | None = None,
    operators: Sequence[str] = (),
    trusted: bool = False,
) -> Bundle:
    """Opens a bundle. No name of a table is taken: any tables may be open in the process, other bundles too.

    A bundle's graph calls operators of a list in this package, which only compute, and reads the bundle's own tables.

    Args:
        directory: as `export` wrote it. Its files must not be changed in place as long as the bundle is in use.
        memory: of the tables, see `FrozenTable`.
        compiled: whether the program that AOTInductor compiled answers; its results may differ in their last bits. It
            is code, see `trusted`.
        follow: a publication of the same model, by its directory, `host:port` of a publisher that serves it, a
            `PublisherAddress`, or `s3://bucket/prefix` of a copy in an object store. Tables and dense tensors then stay
            at its newest step; see `FollowingBundle`. A publication that cannot be read for a while is tried again.
        operators: further operators that the graph may call, also the one of a publication, as
            `"mylib::op.default"`. They must be known to this process.
        trusted: whether the bundle may run code of its own: a program without a graph, or a compiled one, does.

    Raises:
        ValueError: there is no bundle or publication, one has another version, or the publication has another model.
            There is no compiled program, it is for another release of torch or another kind of processor, or it is to
            follow. The graph calls another operator. Or the bundle has code that is not trusted.
        OSError: a file is missing, cut off, changed, or belongs to another bundle. Rows are checked when they are first
            read. Of `program.pt2` the size is checked, and the content when it is read.
    """
    path = Path(user_path(directory, "directory"))
    if follow is not None and compiled:
        raise ValueError("a compiled program does not follow: give compiled or follow")
    files, allowed = BundleFiles(path), Operators(operators)
    if follow is None:
        return open_bundle(files, memory, allowed, compiled=compiled, trusted=trusted)
    return FollowingBundle(files, source_of(follow), memory, allowed)
