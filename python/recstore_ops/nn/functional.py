"""The functional forms: trainable lookups in a table, for models written without modules.

Gradients are collected in the table given; `SparseOptimizer(modules=[table])` applies them.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from recstore_ops.autograd import _DistEmbBagFunction, _DistEmbFunction, _ScaledByFrequency
from recstore_ops.nn import transformed
from recstore_ops.nn.padding import PaddingIdx, padding_ids, with_one_padding, with_rows_of_padding
from recstore_ops.nn.weighted_means import divided_by_weights, sums_of_weights
from recstore_ops.ops import operators
from recstore_ops.ops.traced_regions import region_refusal, stop
from recstore_ops.sharding.pooling import check_offsets, pool_rows, spread_rows
from recstore_ops.sharding.rows import Request, failing_together, sharded_rows
from recstore_ops.sparse.transforms import is_transformed
from recstore_ops.table.checks import check_ids, check_weights
from recstore_ops.table.table import Table, default_table

_MODES = {"sum": operators.SUM, "mean": operators.MEAN, "max": operators.MAX}


def embedding(
    ids: Tensor, table: Table | int, padding_idx: PaddingIdx = None, scale_grad_by_freq: bool = False
) -> Tensor:
    """Reads the row of each id.

    Args:
        ids: int64 (or narrower, or uint64 taken as int64 bits), any shape `[...]`.
        table: an open table, or a dim for the table `default/<dim>`.
        padding_idx: an id whose row gets no gradient, or several.
        scale_grad_by_freq: whether the gradient of a row is divided by how often its id occurs in `ids`.

    Returns:
        float32, `[..., dim]`, on the ids' device.

    Raises:
        TypeError: ids of another dtype.
        ValueError: several padding ids in a sharded table.
        IndexError: an id out of the table's `num_embeddings`; names table, id and position.
    """
    if isinstance(table, int):
        table = default_table(table)
    if table.is_sharded:
        return _sharded_embedding(ids, table, padding_idx, scale_grad_by_freq)
    ids = check_ids(ids)
    if not needs_backward(table, None):
        return operators.emb_read(table.handle, ids, table.dim)
    asked, padding = with_one_padding(ids, padding_idx)
    rows = _rows_with_gradients(asked, table, padding, scale_grad_by_freq)
    return rows if asked is ids else with_rows_of_padding(rows, ids, table, padding_idx)


def _rows_with_gradients(ids: Tensor, table: Table, padding_idx: int | None, scale_grad_by_freq: bool) -> Tensor:
    if is_transformed():
        return transformed.read_rows(ids, transformed.Lookup.of(table, padding_idx, scale_grad_by_freq))
    rows = _DistEmbFunction.apply(table.anchor, ids, table.handle, table.collector, table.dim, padding_idx)
    return _ScaledByFrequency.apply(rows, ids) if scale_grad_by_freq else rows  # type: ignore[return-value]


def embedding_bag(
    input: Tensor,
    table: Table | int,
    offsets: Tensor | None = None,
    mode: Literal["sum", "mean", "max"] = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: PaddingIdx = None,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """Pools the rows of bags of ids, as `torch.nn.functional.embedding_bag`.

    With weights `w` a sum is `sum(w * x)` and a mean `sum(w * x) / sum(w)`, over the rows `x` that count. If the
    weights of a bag add up to zero, its mean is zero and has no gradient.

    Args:
        input: ids, `[N]` with `offsets`, or `[B, L]` for bags of equal length.
        table: an open table, or a dim for the table `default/<dim>`.
        offsets: int64, `[B]`: the start of each bag; `[B + 1]` with `include_last_offset`.
        mode: how the rows of a bag are pooled.
        per_sample_weights: float32, of `input`'s shape: weights of the rows, for `sum` and `mean`. They get a gradient.
        include_last_offset: whether `offsets` also holds the end of the last bag.
        padding_idx: an id that no bag counts and that gets no gradient, or several.
        scale_grad_by_freq: whether the gradient of a row is divided by how often its id occurs in `input`; not for
            mode `max`.

    Returns:
        float32, `[B, dim]`, on the ids' device. An empty bag gives zeros.

    Raises:
        TypeError: ids or offsets of another dtype.
        ValueError: shapes that do not fit together, or an unknown mode.
        IndexError: an id out of the table's `num_embeddings`.
    """
    if isinstance(table, int):
        table = default_table(table)
    given = (input, offsets, mode, per_sample_weights, include_last_offset, padding_idx, scale_grad_by_freq)
    if table.is_sharded:
        with failing_together([table]):
            bags = _Bags.of(*given)
            check_offsets(table.name, bags.ids_N, bags.offsets)
        (rows,) = sharded_rows([Request(table, bags.ids_N, bags.padding_idx)])
        return bags.weighed(pool_rows(rows, bags.offsets, bags.mode, bags.weights_N, scale_grad_by_freq), table)
    bags = _Bags.of(*given)
    return bags.weighed(_pool(table, bags, scale_grad_by_freq), table)


def _pool(table: Table, bags: "_Bags", scale_grad_by_freq: bool) -> Tensor:
    ids_N, offsets, weights_N, mode, padding_idx = bags.ids_N, bags.offsets, bags.weights_N, bags.mode, bags.padding_idx
    if is_transformed():
        lookup = transformed.Lookup.of(table, padding_idx, scale_grad_by_freq)
        return transformed.pool_rows(ids_N, offsets, mode, weights_N, lookup)
    # Without an autograd Function around the operator a forward of one bag takes 9 us, not 26.
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
        scale_grad_by_freq,
    )  # type: ignore[return-value]


def check_mode(mode: str, scale_grad_by_freq: bool) -> None:
    """Checks how bags are pooled.

    Raises:
        ValueError: an unknown mode, or one that has no frequencies.
    """
    if mode not in _MODES:
        raise ValueError(f'mode must be "sum", "mean" or "max", got {mode!r}')
    if scale_grad_by_freq and mode == "max":
        raise ValueError('scale_grad_by_freq goes with mode "sum" or "mean", got mode "max"')


def needs_backward(table: Table, weights: Tensor | None) -> bool:
    """Whether a lookup leads to gradients, of rows or of weights, or a transform is under way that may ask for some.

    Raises:
        RuntimeError: it leads to gradients under `torch.jit.trace`, whose programs collect none.
    """
    is_compiling = torch.compiler.is_compiling()
    # As `is_transformed`, without a call: each lookup comes here.
    if not is_compiling and torch._C._are_functorch_transforms_active():  # type: ignore[attr-defined]
        return True
    wants_weights = weights is not None and weights.requires_grad
    has_backward = torch.is_grad_enabled() and (not table.is_frozen or wants_weights)
    if is_compiling and (refusal := region_refusal(has_backward)):
        stop(table.name, refusal)
    if not has_backward:
        return False
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise RuntimeError(
            f'table "{table.name}": a program of torch.jit.trace collects no gradients, so its lookups are traced '
            "without; trace under torch.no_grad()"
        )
    return True


class _Bags(NamedTuple):
    """The arguments of `embedding_bag`, as lookups take them.

    Attributes:
        ids_N: with one padding id.
        offsets: `[B + 1]`.
        weights_N: the weights of the rows.
        mode: how they are pooled; a weighted mean is a sum first.
        padding_idx: the padding id in `ids_N`.
        is_weighted_mean: whether the sums are to be divided by the sums of the weights.
    """

    ids_N: Tensor
    offsets: Tensor
    weights_N: Tensor | None
    mode: str
    padding_idx: int | None
    is_weighted_mean: bool

    @classmethod
    def of(
        cls,
        input: Tensor,
        offsets: Tensor | None,
        mode: str,
        per_sample_weights: Tensor | None,
        include_last_offset: bool,
        padding_idx: PaddingIdx,
        scale_grad_by_freq: bool,
    ) -> "_Bags":
        """Checks it all."""
        check_mode(mode, scale_grad_by_freq)
        ids = check_ids(input)
        check_weights(ids, per_sample_weights, mode)
        ids_N, offsets = flatten_bags(ids, offsets, include_last_offset)
        ids_N, padding = with_one_padding(ids_N, padding_idx)
        weights_N = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        # A sum first, which the operator does for all: the division is torch's, so that weights get their gradient.
        is_weighted_mean = mode == "mean" and weights_N is not None
        return cls(ids_N, offsets, weights_N, "sum" if is_weighted_mean else mode, padding, is_weighted_mean)

    def weighed(self, pooled_BD: Tensor, table: Table) -> Tensor:
        """Makes weighted means of sums of a table's rows."""
        if not self.is_weighted_mean or self.weights_N is None:
            return pooled_BD
        counted_N = None if self.padding_idx is None else self.ids_N != self.padding_idx
        bag_N = transformed.bags_of(self.ids_N, self.offsets, table)
        weights_B = sums_of_weights(bag_N, self.offsets.shape[-1] - 1, self.weights_N, counted_N)
        return divided_by_weights(pooled_BD, weights_B.unsqueeze(-1))


def _sharded_embedding(ids: Tensor, table: Table, padding_idx: PaddingIdx, scale_grad_by_freq: bool) -> Tensor:
    with failing_together([table]):
        paddings = padding_ids(padding_idx)
        if len(paddings) > 1:
            raise ValueError(f'table "{table.name}" is sharded, and rows of it take one padding id, got {paddings}')
        request = Request(table, check_ids(ids), next(iter(paddings), None))
    (rows,) = sharded_rows([request])
    return spread_rows(rows, scale_grad_by_freq)


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
    if offsets.shape[0] == 0 and ids.shape[0] > 0:
        raise ValueError(f"offsets must hold where each bag starts, got none for {ids.shape[0]} ids")
    return ids, torch.cat([offsets, offsets.new_full((1,), ids.shape[0])])
