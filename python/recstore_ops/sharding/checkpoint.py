"""Checkpoints of sharded tables: all ranks save one snapshot together, and any number of ranks loads it."""

from __future__ import annotations

from dataclasses import replace as replaced
from os import PathLike
from typing import Any

import torch.distributed as dist

from recstore_ops import checkpoint
from recstore_ops._native import commit_parts
from recstore_ops.checkpoint.arguments import Compression, SaveKind, checked_directory, save_arguments
from recstore_ops.checkpoint.pending import tell_failures
from recstore_ops.checkpoint.progress import shown
from recstore_ops.checkpoint.reports import LoadReport, SaveReport, warn_of_kept
from recstore_ops.servers import store
from recstore_ops.sharding.collective import Collective
from recstore_ops.table.known_shards import note_loaded_as, refuse_other_parts

_SAVE = "save its part of the checkpoint"


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
        metadata: what `load` gives back; the same on all ranks, which may leave it to the group's first one.
        compression: of the files of this rank.
        replace: whether to drop the snapshots of other jobs; otherwise they stay, or the save is refused.
        progress: whether this rank shows a progress bar of its part; `None` for one on a terminal.

    Returns:
        A report of the part that this rank wrote.

    Raises:
        ValueError, TypeError: as `recstore_ops.checkpoint.save`; or `path` is a URL: the parts of ranks need a
            directory; or ranks give other arguments than the first one.
        RuntimeError: a table is not sharded over the group; or a rank could not write its part, or the parts do not fit
            together, or the directory has snapshots of other jobs; all ranks raise.
    """
    tell_failures()
    together = Collective(process_group)
    rank, world = together.rank, together.world

    def checked() -> tuple[str, dict[str, Any]]:
        refuse_other_parts("sharding.save", store.table_names(), (rank, world))
        return checked_directory(path, "sharding.save"), save_arguments(kind, keep, metadata, compression, replace)

    directory, arguments = together.all_or_none(_SAVE, checked)
    same = {name: arguments[name] for name in ("kind", "keep", "replace")}
    told = {"metadata": arguments["metadata"]} if rank == 0 or metadata is not None else {}
    # Before any rank writes: the commit would refuse parts that do not fit, but after all the work.
    together.check_same("sharding.save", **same, **told)
    snapshot = together.of_first("name a snapshot", checkpoint.new_snapshot_name)
    with shown("saving", progress) as native:

        def write() -> SaveReport:
            return SaveReport(**store.save_part_of_tables(directory, snapshot, (rank, world), arguments, native))

        report = together.all_or_none(_SAVE, write)
    kept = together.of_first("commit the checkpoint", lambda: commit_parts(directory, snapshot, world, arguments))
    if rank == 0:
        warn_of_kept(path, kept, stacklevel=2)
    return replaced(report, kept=kept)


def load(path: str | PathLike[str], process_group: dist.ProcessGroup, *, snapshot: str | None = None) -> LoadReport:
    """Gives each rank its rows of a directory's newest snapshot, however many ranks saved it.

    All ranks call it together. As `recstore_ops.checkpoint.load`, of whose rows each rank takes those of its own ids.

    Args:
        path: the directory.
        process_group: over which the tables are sharded.
        snapshot: the name of the snapshot to load; the newest by default.

    Raises:
        RuntimeError: a rank could not load; all ranks raise. One that could has its rows loaded.
    """
    together = Collective(process_group)
    shard = together.rank, together.world

    def load_part() -> LoadReport:
        report = checkpoint.load(path, shard=shard, snapshot=snapshot, progress=False)
        # A table that is opened later as another shard would have the rows of the wrong ids.
        note_loaded_as(report.tables, shard)
        return report

    return together.all_or_none("load its part of the checkpoint", load_part)


__all__ = ["load", "save"]
