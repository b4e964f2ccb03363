"""The functional forms: trainable lookups in a table, for models written without modules.

Gradients are collected in the table given; `SparseOptimizer(modules=[table])` applies them.
"""

from typing import Literal

import torch
from torch import Tensor

from recstore_ops.autograd import _DistEmbBagFunction, _DistEmbFunction
from recstore_ops.ops import operators
from recstore_ops.sharding.pooling import check_offsets, pool_rows, spread_rows
from recstore_ops.sharding.rows import Request, failing_together, sharded_rows
from recstore_ops.table.checks import check_ids, check_weights
from recstore_ops.table.table import Table, default_table

_MODES = {"sum": operators.SUM, "mean": operators.MEAN, "max": operators.MAX}


def embedding(ids: Tensor, table: Table | int, padding_idx: int | None = None) -> Tensor:
    """Reads the row of each id.

    Args:
        ids: int64 (or int32, or uint64 taken as int64 bits), any shape `[...]`.
        table: an open table, or a dim for the table `default/<dim>`.
        padding_idx: an id whose row gets no gradient.

    Returns:
        float32, `[..., dim]`, on the ids' device.

    Raises:
        TypeError: ids of another dtype.
        IndexError: an id out of the table's `num_embeddings`; names table, id and position.
    """
    table = _open(table)
    if table.is_sharded:
        return _sharded_embedding(ids, table, padding_idx)
    ids = check_ids(ids)
    if not needs_backward(table, None):
        return operators.emb_read(table.handle, ids, table.dim)
    return _DistEmbFunction.apply(table.anchor, ids, table.handle, table.collector, table.dim, padding_idx)  # type: ignore[return-value]


def embedding_bag(
    input: Tensor,
    table: Table | int,
    offsets: Tensor | None = None,
    mode: Literal["sum", "mean", "max"] = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Pools the rows of bags of ids, as `torch.nn.functional.embedding_bag`.

    Args:
        input: ids, `[N]` with `offsets`, or `[B, L]` for bags of equal length.
        table: an open table, or a dim for the table `default/<dim>`.
        offsets: int64, `[B]`: where each bag starts; `[B + 1]` with `include_last_offset`.
        mode: how the rows of a bag are pooled.
        per_sample_weights: float32, of `input`'s shape: factors of the rows; mode `sum` only. They get a gradient.
        include_last_offset: whether `offsets` also holds the end of the last bag.
        padding_idx: an id that no bag counts and that gets no gradient.

    Returns:
        float32, `[B, dim]`, on the ids' device. An empty bag gives zeros.

    Raises:
        TypeError: ids or offsets of another dtype.
        ValueError: shapes that do not fit together, or an unknown mode.
        IndexError: an id out of the table's `num_embeddings`.
    """
    table = _open(table)
    if table.is_sharded:
        return _sharded_embedding_bag(input, table, offsets, mode, per_sample_weights, include_last_offset, padding_idx)
    ids_N, offsets, weights_N = _flat_bags(input, offsets, mode, per_sample_weights, include_last_offset)
    if not needs_backward(table, weights_N):
        pooled_BD, _ = operators.emb_bag(table.handle, ids_N, offsets, table.dim, _MODES[mode], weights_N, padding_idx)
        return pooled_BD
    return _DistEmbBagFunction.apply(
        table.anchor,
        weights_N,
        ids_N,
        offsets,
        table.handle,
        table.collector,
        table.dim,
        _MODES[mode],
        padding_idx,
    )  # type: ignore[return-value]


def needs_backward(table: Table, weights: Tensor | None) -> bool:
    """Whether a lookup leads to gradients, of rows or of their weights.

    Raises:
        RuntimeError: it does, under `torch.jit.trace`, whose programs collect none.
    """
    wants_weights = weights is not None and weights.requires_grad
    if not (torch.is_grad_enabled() and (table.requires_grad or wants_weights)):
        return False
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise RuntimeError(
            f'table "{table.name}": a program of torch.jit.trace collects no gradients, so its lookups are traced '
            "without; trace under torch.no_grad()"
        )
    return True


def _flat_bags(
    input: Tensor, offsets: Tensor | None, mode: str, per_sample_weights: Tensor | None, include_last_offset: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Checks what `embedding_bag` was given, and returns ids `[N]`, offsets `[B + 1]` and weights `[N]`."""
    if mode not in _MODES:
        raise ValueError(f'mode must be "sum", "mean" or "max", got {mode!r}')
    ids = check_ids(input)
    check_weights(ids, per_sample_weights, mode)
    ids_N, offsets = flatten_bags(ids, offsets, include_last_offset)
    return ids_N, offsets, None if per_sample_weights is None else per_sample_weights.reshape(-1)


def _sharded_embedding(ids: Tensor, table: Table, padding_idx: int | None) -> Tensor:
    with failing_together([table]):
        request = Request(table, check_ids(ids), padding_idx)
    (rows,) = sharded_rows([request])
    return spread_rows(rows)


def _sharded_embedding_bag(
    input: Tensor,
    table: Table,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    with failing_together([table]):
        ids_N, offsets, weights_N = _flat_bags(input, offsets, mode, per_sample_weights, include_last_offset)
        check_offsets(table.name, ids_N, offsets)
    (rows,) = sharded_rows([Request(table, ids_N, padding_idx)])
    return pool_rows(rows, offsets, mode, weights_N)


def flatten_bags(ids: Tensor, offsets: Tensor | None, include_last_offset: bool) -> tuple[Tensor, Tensor]:
    """Returns ids `[N]` and offsets `[B + 1]` of 1-D or 2-D bags.

    Raises:
        ValueError: offsets missing for 1-D ids, given for 2-D ids, or not 1-D.
        TypeError: offsets that are not int64 or int32.
    """
    if ids.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets must be None for 2-D ids, whose rows are the bags")
        bags, length = ids.shape
        return ids.reshape(-1), torch.arange(bags + 1, dtype=torch.int64, device=ids.device) * length
    if ids.dim() != 1:
        raise ValueError(f"ids of bags must be 1-D or 2-D, got {ids.dim()}-D")
    if offsets is None:
        raise ValueError("offsets must be given for 1-D ids")
    if offsets.dim() != 1:
        raise ValueError(f"offsets must be 1-D, got {offsets.dim()}-D")
    if offsets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"offsets must be int64 or int32, got {offsets.dtype}")
    offsets = offsets.to(torch.int64)
    if include_last_offset:
        return ids, offsets
    return ids, torch.cat([offsets, offsets.new_full((1,), ids.shape[0])])


def _open(table: Table | int) -> Table:
    return default_table(table) if isinstance(table, int) else table
