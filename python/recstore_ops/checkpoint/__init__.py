"""Checkpoints: all tables of this process in a directory, written while they are trained on.

A directory holds snapshots: full ones, and deltas, which record the changes since the snapshot before. If a save fails
at any point, the directory holds the old snapshots or the new ones, never a mixture. `docs/checkpoint_format.md`
describes the format.

Several processes that share tables, each with rows of its own, save one snapshot together: each calls `save_part`, then
one `commit`. Any number of processes can `load` it, each its shard.
"""

from recstore_ops.checkpoint.arguments import Compression, SaveKind
from recstore_ops.checkpoint.pending import PendingSave
from recstore_ops.checkpoint.reports import LoadReport, SaveReport
from recstore_ops.checkpoint.saving import commit, compact, load, new_snapshot_name, save, save_async, save_part
from recstore_ops.checkpoint.upkeep import FileFinding, PruneReport, VerifyReport, prune, verify
from recstore_ops.table.shard_of import shard_of

__all__ = [
    "Compression",
    "FileFinding",
    "LoadReport",
    "PendingSave",
    "PruneReport",
    "SaveKind",
    "SaveReport",
    "VerifyReport",
    "commit",
    "compact",
    "load",
    "new_snapshot_name",
    "prune",
    "save",
    "save_async",
    "save_part",
    "shard_of",
    "verify",
]
