"""Reports about a table or a checkpoint: configuration, statistics, norms, rows and optimizer state."""

from recstore_ops.inspect.checkpoint_report import (
    CheckpointReport,
    SavedTableReport,
    SnapshotReport,
    inspect_checkpoint,
)
from recstore_ops.inspect.table_report import InspectedRow, RowNorms, TableReport, inspect_table

__all__ = [
    "CheckpointReport",
    "InspectedRow",
    "RowNorms",
    "SavedTableReport",
    "SnapshotReport",
    "TableReport",
    "inspect_checkpoint",
    "inspect_table",
]
