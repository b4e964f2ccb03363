"""How many rows are moved at a time, and how a user sees that they are.

Shape suffix: N ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recstore_ops.config.progress_bars import Bar, progress_bar
from recstore_ops.table.table import Table

_BYTES_AT_A_TIME = 16 << 20


def rows_at_a_time(table: Table) -> int:
    """How many rows of a table are moved at a time."""
    return max(1, _BYTES_AT_A_TIME // (4 * table.dim))


def as_tensor(ids: Tensor | range) -> Tensor:
    """Ids, `[N]`."""
    return ids if isinstance(ids, Tensor) else torch.arange(ids.start, ids.stop, dtype=torch.int64, device="cpu")


def bar_of_rows(what: str, rows: int, progress: bool | None) -> Bar:
    """A progress bar; by default if the standard error is a terminal or a notebook."""
    return progress_bar(progress, total=rows, desc=what, unit="row", unit_scale=True)
