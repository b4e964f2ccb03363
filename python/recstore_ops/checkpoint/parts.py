"""A snapshot that several processes save together, each the rows of its shard.

All are given one name, from `new_snapshot_name` of one of them. Each calls `save_part`; when all have, one calls
`commit`, with which the snapshot counts. `shard_of` tells whose row an id is, for who has no way of telling already.
"""

from os import PathLike
from typing import Any

from recstore_ops import _native
from recstore_ops.checkpoint.arguments import Compression, SaveKind, save_arguments
from recstore_ops.checkpoint.pending import tell_failures
from recstore_ops.checkpoint.place import checked_directory
from recstore_ops.checkpoint.progress import shown
from recstore_ops.checkpoint.reports import SaveReport
from recstore_ops.servers import store
from recstore_ops.table.known_shards import TOGETHER, refuse_sharded
from recstore_ops.table.shard_of import check_shard, shard_of


def new_snapshot_name() -> str:
    """A name that no snapshot has, for all processes that save one together."""
    return _native.new_snapshot_name()


def save_part(
    path: str | PathLike[str],
    snapshot: str,
    shard: int,
    num_shards: int,
    *,
    kind: SaveKind = "full",
    compression: Compression = None,
    progress: bool | None = None,
) -> SaveReport:
    """Saves all tables of this process as the part that it has in a snapshot, which counts once it was committed.

    No other snapshot may be saved to the directory until then, and the shards must not be trained between their saves:
    all are saved at the same step. After a failure, or to save again, all begin anew with another name.

    Args:
        path: the directory; made if it is not there.
        snapshot: the name that all shards were given, from `new_snapshot_name`.
        shard: the number of this process's part, from 0.
        num_shards: how many parts there are.
        kind: as in `save`, and so is `compression`; the kind is the same for all shards.
        progress: whether to show a progress bar; by default if the standard error is a terminal or a notebook.

    Returns:
        What this process wrote.

    Raises:
        ValueError: `kind`, `compression` or `shard` is invalid, or `path` a URL.
        RuntimeError: the directory cannot be written, or the name is none, or a table is sharded over ranks otherwise;
            what it holds still counts.
    """
    place, arguments = check_shard(shard, num_shards), save_arguments(kind, 1, None, compression)
    directory = checked_directory(path, "save_part")
    refuse_sharded("checkpoint.save_part", None, TOGETHER, but=place)
    tell_failures()
    with shown("saving", progress) as native:
        return SaveReport(**store.save_part_of_tables(directory, snapshot, place, arguments, native))


def commit(
    path: str | PathLike[str],
    snapshot: str,
    num_shards: int,
    *,
    keep: int = 1,
    metadata: Any = None,
    replace: bool = False,
) -> None:
    """Makes what all shards saved the newest snapshot of a directory. One process calls it, when all parts are there.

    Args:
        path: the directory.
        snapshot: the name that the shards saved under.
        num_shards: how many parts there are.
        keep: as in `save`, and so are `metadata` and `replace`.

    Raises:
        ValueError, TypeError: `keep` or `metadata` is invalid, as in `save`, or `path` a URL.
        RuntimeError: a part is missing, or the parts do not fit together: they are of other tables, configurations,
            steps or parents. The directory's newest snapshot is what it was.
    """
    arguments = save_arguments("full", keep, metadata, replace=replace)
    check_shard(0, num_shards)
    _native.commit_parts(checked_directory(path, "commit"), snapshot, num_shards, arguments)


__all__ = ["commit", "new_snapshot_name", "save_part", "shard_of"]
