"""Checkpoints of sharded tables: all ranks save one snapshot together, and any number of ranks loads it."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any, TypeVar

import torch.distributed as dist

from recstore_ops import checkpoint
from recstore_ops._native import commit_parts
from recstore_ops.checkpoint.arguments import Compression, SaveKind, save_arguments
from recstore_ops.checkpoint.pending import tell_failures
from recstore_ops.checkpoint.place import checked_directory
from recstore_ops.checkpoint.progress import shown
from recstore_ops.checkpoint.reports import LoadReport, SaveReport
from recstore_ops.servers import store

_Result = TypeVar("_Result")


def save(
    path: str | PathLike[str],
    process_group: dist.ProcessGroup,
    *,
    kind: SaveKind = "full",
    keep: int = 1,
    metadata: Any = None,
    compression: Compression = None,
    replace: bool = False,
    progress: bool | None = False,
) -> SaveReport:
    """Saves all tables of all ranks as one snapshot. All ranks call it together, between the same two steps.

    Every table of these processes must be sharded over the group. The snapshot counts when all ranks have written
    theirs; until then the directory holds what it held before.

    Args:
        path: a directory that all ranks see; made if it is not there.
        process_group: over which the tables are sharded.
        kind: as in `recstore_ops.checkpoint.save`, and so are `keep`, `metadata`, `compression` and
            `replace`; the same on all ranks.
        keep: how many full snapshots stay.
        metadata: what `load` gives back; that of the group's first rank.
        compression: of the files of this rank.
        replace: whether tables without rows on any rank may take the place of the rows that others saved.
        progress: whether this rank shows a progress bar of its part; `None` for one on a terminal.

    Returns:
        What this rank wrote.

    Raises:
        ValueError, TypeError: as `recstore_ops.checkpoint.save`; or `path` is a URL: the parts of ranks need a
            directory.
        RuntimeError: a rank could not write its part, or the parts do not fit together; all ranks raise.
    """
    tell_failures()
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)

    def checked() -> tuple[str, dict[str, Any]]:
        own_metadata = metadata if rank == 0 else None
        return checked_directory(path, "sharding.save"), save_arguments(kind, keep, own_metadata, compression, replace)

    directory, arguments = _all_or_none(process_group, "save", checked)
    snapshot = _of_first(process_group, checkpoint.new_snapshot_name)
    with shown("saving", progress) as native:

        def write() -> SaveReport:
            return SaveReport(**store.save_part_of_tables(directory, snapshot, (rank, world), arguments, native))

        report = _all_or_none(process_group, "save", write)
    _of_first(process_group, lambda: commit_parts(directory, snapshot, world, arguments))
    return report


def load(path: str | PathLike[str], process_group: dist.ProcessGroup) -> LoadReport:
    """Gives each rank its rows of a directory's newest snapshot, however many ranks saved it.

    All ranks call it together. As `recstore_ops.checkpoint.load`, of whose rows each rank takes those of its own ids.

    Raises:
        RuntimeError: a rank could not load; all ranks raise. One that could has its rows loaded.
    """
    shard = dist.get_rank(process_group), dist.get_world_size(process_group)
    return _all_or_none(process_group, "load", lambda: checkpoint.load(path, shard=shard, progress=False))


def _of_first(group: dist.ProcessGroup, work: Callable[[], _Result]) -> _Result:
    """What the first rank's work gives, on all ranks.

    Raises:
        RuntimeError: it failed; on the first rank its own error.
    """
    results: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            results[0] = work()
        except Exception as error:
            dist.broadcast_object_list([None, str(error)], group=group, group_src=0)
            raise
    dist.broadcast_object_list(results, group=group, group_src=0)
    if results[1] is not None:
        raise RuntimeError(f"rank 0 of the checkpoint failed: {results[1]}")
    return results[0]


def _all_or_none(group: dist.ProcessGroup, what: str, work: Callable[[], _Result]) -> _Result:
    """Does this rank's work, and raises where that of any rank failed."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, None if failure is None else str(failure), group=group)
    if failure is not None:
        raise failure
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if failed:
        raise RuntimeError(f"rank {failed[0]} could not {what} its part of the checkpoint: {messages[failed[0]]}")
    return result


__all__ = ["load", "save"]
