"""The autograd Functions: forward reads the store, backward collects gradients for it.

A table is no tensor, so the functions take a scalar `anchor` that requires a gradient and never gets one: it only
puts them on the tape; that of a frozen table requires none. `backward` sums the gradients of duplicate ids and hands
them to the collector; the optimizer's step is `SparseOptimizer.step`. It does so in passes that reach the anchor: one
that asks for the gradient of weights only collects nothing.

Shape suffixes: N ids, D dim, B bags, U distinct ids.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from recstore_ops.ops import asked_gradients, collecting, feature_operators, operators
from recstore_ops.ops.collecting import collect, merge_gradients, merges_here, set_merge, unshared
from recstore_ops.ops.traced_regions import CollectingFunction
from recstore_ops.sparse._bags import bag_of_each


def collect_bags(
    collectors: list[Tensor],
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    grads: Tensor,
    dims: list[int],
    weights: Tensor | None,
    padding_idx: int | None,
    places: Tensor | None,
) -> None:
    """Hands the gradients of sums of bags to collectors: each id gets that of its bag, times its weight.

    Args:
        collectors: F handles.
        tables: F handles.
        ids: `[N]`, those of the first table first.
        offsets: `[F * B + 1]`.
        grads: `[B, sum of dims]`.
        dims: F dims.
        weights: `[N]`, or `None` for ones.
        padding_idx: an id whose gradients do not count.
        places: what the lookup of the same ids gave out; spares the step its search.
    """
    if collecting.hooked:
        collectors = collecting.begin_pass(collectors)
    if merges_here():
        feature_operators.accept_feature_grads(tables, collectors, ids, offsets, grads, dims, weights, padding_idx)
        return
    ids, grads, weights = unshared(ids), unshared(grads), None if weights is None else unshared(weights)
    # A graph uses the memory of gradients again without notice, so there the collector copies.
    keep = not torch.compiler.is_compiling()
    operators.accept_bag_grads(collectors, tables, ids, offsets, grads, dims, weights, padding_idx, places, keep)


def _collect(
    anchor: Tensor,
    collector: Tensor,
    table: Tensor,
    ids: Tensor,
    grads: Tensor,
    padding_idx: int | None,
    places: Tensor | None = None,
) -> None:
    """Collects gradients in the backward of a function that has the anchor only, so that the pass is about it."""
    # A graph runs as one node for all its inputs, so an operator asks when it runs.
    if torch.compiler.is_compiling():
        asked_gradients.accept_asked_grad(anchor, collector, table, ids, grads, padding_idx, places)
    elif anchor.requires_grad:  # It may be frozen since the lookup.
        collect(collector, table, ids, grads, padding_idx, places)


class _DistEmbFunction(CollectingFunction):
    """Rows of a table: `ids [...] -> [..., D]`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: Tensor,
        ids: Tensor,
        table: Tensor,
        collector: Tensor,
        dim: int,
        padding_idx: int | None,
    ) -> Tensor:
        # The collector keeps the ids until the step. torch counts no changes of memory that numpy shares.
        ids = unshared(ids)
        rows, places = operators.emb_read_places(table, ids, dim)
        ctx.save_for_backward(anchor, ids, table, collector, places)
        ctx.padding_idx = padding_idx
        return rows

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        anchor, ids, table, collector, places = ctx.saved_tensors
        _collect(anchor, collector, table, ids, grad_outputs[0], ctx.padding_idx, places)
        return (None,) * 6


class _DistEmbBagFunction(CollectingFunction):
    """Pooled rows of a table: `ids [N]`, `offsets [B + 1]` -> `[B, D]`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: Tensor,
        per_sample_weights: Tensor | None,
        ids: Tensor,
        offsets: Tensor,
        table: Tensor,
        collector: Tensor,
        dim: int,
        mode: int,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
    ) -> Tensor:
        ids, offsets = unshared(ids), unshared(offsets)
        weights_N = None if per_sample_weights is None else per_sample_weights.detach()
        pooled_BD, max_positions_BD, places = operators.emb_bag_places(
            [table], ids, offsets, [dim], mode, weights_N, padding_idx
        )
        # The gradient of weights needs the rows of this moment: a step before `backward` would change them.
        needs_rows = ctx.needs_input_grad[1]
        rows_ND = operators.emb_read(table, ids, dim) if needs_rows else None
        ctx.save_for_backward(anchor, ids, offsets, table, collector, weights_N, max_positions_BD, rows_ND, places)
        ctx.dim, ctx.mode, ctx.padding_idx, ctx.scale_grad_by_freq = dim, mode, padding_idx, scale_grad_by_freq
        return pooled_BD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        anchor, ids, offsets, table, collector, weights_N, max_positions_BD, rows_ND, places = ctx.saved_tensors
        grad_BD = grad_outputs[0].to(torch.float32)
        # A maximum takes no weights, so the anchor is the only input that such a pass can be about.
        if ctx.mode == operators.MAX:
            grad_ND = _max_gradients(grad_BD, max_positions_BD, ids.shape[0])
            _collect(anchor, collector, table, ids, grad_ND, ctx.padding_idx, places)
            return (None,) * 10
        counted_N = None if ctx.padding_idx is None else ids != ctx.padding_idx
        if ctx.mode == operators.MEAN:
            grad_BD = grad_BD / _bag_sizes(offsets, counted_N)
        bags = _Bags(anchor, [collector], [table], ids, offsets, [ctx.dim], ctx.padding_idx)
        factors_N = weights_N
        if ctx.scale_grad_by_freq:
            factors_N = shares_of_ids(ids) if weights_N is None else shares_of_ids(ids) * weights_N
        bags.collect(ctx, grad_BD, factors_N, places)
        grad_weights_N = None
        if rows_ND is not None:
            grad_weights_N = (grad_BD[bag_of_each(ids, offsets)] * bags.on_tape(rows_ND)).sum(-1)
            if counted_N is not None:
                grad_weights_N = grad_weights_N * counted_N
        return None, grad_weights_N, *((None,) * 8)


class _Bags(NamedTuple):
    """The bags of F features in the backward of their sums."""

    anchor: Tensor
    collectors: list[Tensor]
    tables: list[Tensor]
    ids: Tensor
    offsets: Tensor
    dims: list[int]
    padding_idx: int | None = None

    def collect(self, ctx: Any, grad_BD: Tensor, weights_N: Tensor | None, places: Tensor | None) -> None:
        """Hands the gradients of the sums to the collectors, in a pass that is about rows."""
        anchor, collectors, tables, ids, offsets, dims, padding_idx = self
        if torch.compiler.is_compiling():
            asked_gradients.accept_asked_bag_grads(
                anchor, collectors, tables, ids, offsets, grad_BD, dims, weights_N, padding_idx, places
            )
        # Without a gradient for weights only the anchor leads the engine here, so it need not be asked.
        elif anchor.requires_grad and (not ctx.needs_input_grad[1] or asked_gradients.reaches_anchor(ctx)):
            collect_bags(collectors, tables, ids, offsets, grad_BD, dims, weights_N, padding_idx, places)

    def backward(
        self, ctx: Any, grad: Tensor, weights_N: Tensor | None, rows_ND: Tensor | None, places: Tensor | None
    ) -> Tensor | None:
        """Collects the gradients of the sums' rows; if `rows_ND` are given, returns the gradient of their weights."""
        grad_BD = grad.to(torch.float32)
        self.collect(ctx, grad_BD, weights_N, places)
        return None if rows_ND is None else _weight_gradients(grad_BD, self.dims, self.offsets, self.on_tape(rows_ND))

    def on_tape(self, rows_ND: Tensor) -> Tensor:
        """The rows for the gradient of the weights, on the tape if that gradient is differentiated again.

        Compiled graphs refuse a second differentiation.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return rows_ND
        return _RowsOfWeights.apply(self.anchor, rows_ND, self)  # type: ignore[return-value]


class _RowsOfWeights(Function):
    """Rows that were read, as they are: `[N, D]`, those of each feature filled up to the largest dim."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows_ND: Tensor, bags: _Bags) -> Tensor:  # type: ignore[override]
        ctx.bags = bags
        return rows_ND.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        bags = ctx.bags
        parts = feature_operators.slices_of_features(bags.offsets, len(bags.tables))
        for collector, table, part, dim in zip(bags.collectors, bags.tables, parts, bags.dims, strict=True):
            collect(collector, table, bags.ids[part], grad_outputs[0][part, :dim], bags.padding_idx)
        return (None,) * 3


def _bag_sizes(offsets: Tensor, counted_N: Tensor | None) -> Tensor:
    """The ids that each bag counts, `[B, 1]`, at least 1."""
    sizes_B = offsets.diff().to(torch.float32)
    if counted_N is not None:
        bag_N = bag_of_each(counted_N, offsets)
        sizes_B = torch.zeros_like(sizes_B).index_add_(0, bag_N, counted_N.to(torch.float32))
    return sizes_B.clamp(min=1).unsqueeze(-1)


def _max_gradients(grad_BD: Tensor, max_positions_BD: Tensor, num_ids: int) -> Tensor:
    """Gives each column's gradient to the id that held its maximum, `[N, D]`."""
    grad_ND = grad_BD.new_zeros((num_ids, grad_BD.shape[1]))
    # `scatter_add_` refuses index 0 of an empty dimension, and all bags are empty here.
    if num_ids == 0:
        return grad_ND
    # An empty bag has the position -1, which is no index: it adds a zero to the first id.
    held_BD = max_positions_BD >= 0
    held_grad_BD = torch.where(held_BD, grad_BD, 0.0)
    return grad_ND.scatter_add_(0, max_positions_BD.clamp(min=0), held_grad_BD)


class _ScaledByFrequency(Function):
    """Rows `[..., D]` of ids `[...]` as they are; `backward` divides gradients by how often their id occurs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(ids)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return grad_outputs[0] * shares_of_ids(ids).unsqueeze(-1), None


def shares_of_ids(ids: Tensor) -> Tensor:
    """One by how often each id occurs, float32 in the shape of the ids."""
    _, inverse = operators.unique(ids)
    ones_N = torch.ones(ids.numel(), dtype=torch.float32, device=ids.device)
    counts_N = torch.zeros_like(ones_N).index_add_(0, inverse.reshape(-1), ones_N)
    return counts_N[inverse].reciprocal()


class HashTableLookupFunction(CollectingFunction):
    """Indices and rows of distinct ids: `ids [U]` -> int64 `[U]`, float32 `[U, D]`.

    With `insert` ids without a row get one; otherwise their index is -1, and their row is their initial value.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: Tensor,
        ids: Tensor,
        table: Tensor,
        collector: Tensor,
        dim: int,
        insert: bool,
    ) -> tuple[Tensor, Tensor]:
        ids = unshared(ids)
        index_U, rows_UD = operators.hashtable_lookup(table, ids, dim, insert)
        ctx.save_for_backward(anchor, ids, table, collector)
        return index_U, rows_UD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        anchor, ids, table, collector = ctx.saved_tensors
        _collect(anchor, collector, table, ids, grad_outputs[1], None)
        return (None,) * 6


HashTableLookupHelpFunction = HashTableLookupFunction
"""The name in RecIS."""


class GradWorkerMeanFunction(Function):
    """The row of each place of a batch: `rows [U, D]`, `inverse [N]` -> `[N, D]`.

    `backward` sums the gradients of a row's places and divides the sum: for `grad_reduce_by="worker"` by
    `num_workers`, for `"id"` by the number of those places.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: Tensor,
        inverse: Tensor,
        grad_reduce_by: Literal["worker", "id"],
        num_workers: int,
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_rows, ctx.grad_reduce_by, ctx.num_workers = rows.shape[0], grad_reduce_by, num_workers
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_N,) = ctx.saved_tensors
        grad_ND = grad_outputs[0]
        sums_UD = grad_ND.new_zeros((ctx.num_rows, grad_ND.shape[1])).index_add_(0, inverse_N, grad_ND)
        if ctx.grad_reduce_by == "id":
            return sums_UD / _places(inverse_N, ctx.num_rows), None, None, None
        return sums_UD / ctx.num_workers, None, None, None


def _places(inverse_N: Tensor, num_rows: int) -> Tensor:
    """How often each row occurs, float32 `[U, 1]`, at least 1."""
    ones_N = torch.ones_like(inverse_N, dtype=torch.float32)
    return ones_N.new_zeros(num_rows).index_add_(0, inverse_N, ones_N).clamp(min=1).unsqueeze(1)


class _RecStoreEBCFunction(CollectingFunction):
    """Sums of the rows of several features: `ids [N]`, `offsets [F * B + 1]` -> `[B, sum of dims]`.

    `handles` are T tables and then the collector of each; feature f reads `handles[table_numbers[f]]`, whose dim is
    `dims[f]`. Each tensor comes once: `torch.compile` takes none twice.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: Tensor,
        per_sample_weights: Tensor | None,
        ids: Tensor,
        offsets: Tensor,
        dims: list[int],
        table_numbers: list[int],
        *handles: Tensor,
    ) -> Tensor:
        ids, offsets = unshared(ids), unshared(offsets)
        tables = [handles[number] for number in table_numbers]
        weights_N = None if per_sample_weights is None else per_sample_weights.detach()
        pooled_BD, _, places = operators.emb_bag_places(tables, ids, offsets, dims, operators.SUM, weights_N)
        needs_rows = ctx.needs_input_grad[1]
        rows_ND = feature_operators.read_features(tables, ids, offsets, dims) if needs_rows else None
        ctx.save_for_backward(anchor, ids, offsets, weights_N, rows_ND, places, *handles)
        ctx.dims, ctx.table_numbers = dims, table_numbers
        return pooled_BD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        anchor, ids, offsets, weights_N, rows_ND, places, *handles = ctx.saved_tensors
        tables = [handles[number] for number in ctx.table_numbers]
        collectors = [handles[len(handles) // 2 + number] for number in ctx.table_numbers]
        bags = _Bags(anchor, collectors, tables, ids, offsets, ctx.dims)
        grad_weights_N = bags.backward(ctx, grad_outputs[0], weights_N, rows_ND, places)
        return None, grad_weights_N, *((None,) * (len(ctx.needs_input_grad) - 2))


class _EagerEBCFunction(CollectingFunction):
    """As `_RecStoreEBCFunction`, with the handles of each feature as lists, and the rows if they were read already.

    Autograd examines each tensor that it gets, which takes longer than the lookup of a small batch.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: Tensor,
        per_sample_weights: Tensor | None,
        ids: Tensor,
        offsets: Tensor,
        dims: list[int],
        tables: list[Tensor],
        collectors: list[Tensor],
        rows: list[Tensor] | None,
    ) -> Tensor:
        ids, offsets = unshared(ids), unshared(offsets)
        weights_N = None if per_sample_weights is None else per_sample_weights.detach()
        needs_rows = ctx.needs_input_grad[1]
        if rows is None:
            pooled_BD, _, places = operators.emb_bag_places(tables, ids, offsets, dims, operators.SUM, weights_N)
            rows_ND = feature_operators.read_features(tables, ids, offsets, dims) if needs_rows else None
        else:
            # A prefetch returns rows without their places, so the step of these ids searches the id map.
            rows, places = [part.to(ids.device) for part in rows], None
            pooled_BD = _pool_features(rows, offsets, weights_N)
            rows_ND = _filled_up(rows, max(dims)) if needs_rows else None
        # Handles stay out of the saved tensors and, as lists, out of autograd's sight: 52 tensor arguments cost 25 us
        # of a forward and 9 us of a backward pass.
        ctx.save_for_backward(anchor, ids, offsets, weights_N, rows_ND, places)
        ctx.dims, ctx.tables, ctx.collectors = dims, tables, collectors
        return pooled_BD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        anchor, ids, offsets, weights_N, rows_ND, places = ctx.saved_tensors
        bags = _Bags(anchor, ctx.collectors, ctx.tables, ids, offsets, ctx.dims)
        return None, bags.backward(ctx, grad_outputs[0], weights_N, rows_ND, places), *((None,) * 6)


def _pool_features(rows: list[Tensor], offsets: Tensor, weights_N: Tensor | None) -> Tensor:
    """Sums the rows of each bag of each feature, `[B, sum of dims]`."""
    batch = (offsets.shape[0] - 1) // len(rows)
    pooled, start = [], 0
    for feature, part in enumerate(rows):
        stop = start + part.shape[0]
        own_offsets = offsets[feature * batch : (feature + 1) * batch + 1] - start
        own_weights = None if weights_N is None else weights_N[start:stop]
        positions = torch.arange(part.shape[0], dtype=torch.int64, device=part.device)
        pooled.append(
            functional.embedding_bag(
                positions, part, own_offsets, mode="sum", per_sample_weights=own_weights, include_last_offset=True
            )
        )
        start = stop
    return torch.cat(pooled, dim=1)


def _weight_gradients(grad_BD: Tensor, dims: list[int], offsets: Tensor, rows_ND: Tensor) -> Tensor:
    """The gradient of each id's weight, `[N]`, from rows that are filled up with zeros to the largest dim."""
    grad_of_bags = _filled_up(grad_BD.split(dims, dim=1), rows_ND.shape[1])
    return (grad_of_bags[bag_of_each(rows_ND, offsets)] * rows_ND).sum(-1)


def _filled_up(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The rows of all parts, filled up with zeros to `dim`."""
    return torch.cat([functional.pad(part, (0, dim - part.shape[1])) for part in parts])


__all__ = ["collect", "merge_gradients", "set_merge"]
