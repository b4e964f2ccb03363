"""Rows that are read and written without an exchange, which are this rank's own."""

from __future__ import annotations

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.table.table import Table


def check_owned(table: Table, ids: Tensor) -> None:
    """Refuses ids of a sharded table that other ranks own.

    Raises:
        ValueError: there are some; names table, id and position.
    """
    if table.shard is None or not table.is_sharded:
        return
    flat_N = ids.reshape(-1).cpu()
    flat_N = flat_N.view(torch.int64) if flat_N.dtype == torch.uint64 else flat_N.to(torch.int64)
    foreign = (~table.shard.owns(flat_N)).nonzero().flatten()
    if foreign.numel() > 0:
        position = int(foreign[0])
        raise ValueError(
            f'table "{table.name}": id {int(flat_N[position])} at position {position} is not of rank '
            f"{table.shard.rank} of {table.shard.world}, and only a lookup by its module reaches other ranks' rows"
        )


def own_ids(table: Table, ids: Tensor) -> Tensor:
    """Whether each id, int64 `[N]`, has its row in this process: bool `[N]`; true for a table that is not sharded."""
    if table.shard is None or not table.is_sharded:
        return torch.ones_like(ids, dtype=torch.bool)
    return table.shard.owns(ids)


def write_own(table: Table, ids: Tensor, rows: Tensor) -> None:
    """Writes rows, float32 `[N, dim]`; to a sharded table those of this rank's ids `[N]` only."""
    if table.shard is not None and table.is_sharded:
        is_own_N = own_ids(table, ids)
        ids, rows = ids[is_own_N], rows[is_own_N]
    operators.emb_write(table.handle, ids, rows)
