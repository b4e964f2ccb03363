"""Lookups under the transforms of `torch.func`: gradients of what is dense, and ids that `vmap` batches.

A transform hands out tensors that are no plain ones, on several levels. So a lookup is made here of one Function that
reads rows, which every transform takes down to plain tensors, and of torch's own operators over these rows. Ids that
are batched are just more ids. Rows get a gradient if the transform differentiates their module's parameter.

Shape suffixes: N ids, D dim, B bags, V samples of a `vmap`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from recstore_ops.ops import operators
from recstore_ops.ops.collecting import collect, unshared
from recstore_ops.ops.traced_regions import CollectingFunction
from recstore_ops.sharding.pooling import check_offsets, sum_bags
from recstore_ops.sparse._bags import bag_of_each
from recstore_ops.sparse.transforms import is_transformed
from recstore_ops.table.refusals import NO_ENSEMBLE
from recstore_ops.table.table import Table


@dataclass(frozen=True, eq=False)
class Lookup:
    """The arguments of a lookup, except its ids.

    Attributes:
        table: not sharded.
        padding_idx: an id whose row gets no gradient.
        inserts: whether ids without a row get one.
        divisor: what the gradients of a row are divided by; `None` for the number of its ids.
    """

    table: Table
    padding_idx: int | None = None
    inserts: bool = False
    divisor: int | None = 1

    @classmethod
    def of(cls, table: Table, padding_idx: int | None, scale_grad_by_freq: bool) -> "Lookup":
        """The lookup of `embedding` and `embedding_bag`."""
        return cls(table, padding_idx, divisor=None if scale_grad_by_freq else 1)

    def read(self, ids: Tensor) -> Tensor:
        """The rows of plain ids, `[...] -> [..., D]`."""
        table = self.table
        if self.inserts:
            # Each id once: of a batch under `vmap` all samples come together here.
            operators.hashtable_lookup(table.handle, operators.unique(ids.reshape(-1))[0], table.dim, True)
        return operators.emb_read(table.handle, ids, table.dim)

    def collect(self, ids: Tensor, grads: Tensor) -> None:
        """Collects the gradients `[..., D]` of plain ids `[...]`."""
        ids_N, grads_ND = ids.reshape(-1), grads.reshape(-1, self.table.dim)
        if self.divisor is None:
            _, inverse_N, counts = ids_N.unique(return_inverse=True, return_counts=True)
            grads_ND = grads_ND / counts[inverse_N].unsqueeze(1)
        elif self.divisor != 1:
            grads_ND = grads_ND / self.divisor
        collect(self.table.collector, self.table.handle, ids_N, grads_ND, self.padding_idx)

    def refusal(self, what: str) -> RuntimeError:
        """An error that names the module and its table."""
        return RuntimeError(f'{self.table.owner} over table "{self.table.name}": {what}')


def read_rows(ids: Tensor, lookup: Lookup) -> Tensor:
    """The row of each id, `[...] -> [..., D]`."""
    return _Rows.apply(lookup.table.anchor, ids, lookup)  # type: ignore[return-value]


# The transforms take only a Function whose `forward` has no context and which has `setup_context` beside it.
class _Rows(CollectingFunction):
    """Rows of ids, `[...] -> [..., D]`."""

    @staticmethod
    def named(ctx: Any) -> str:
        return ctx.lookup.table.name

    @staticmethod
    def forward(anchor: Tensor, ids: Tensor, lookup: Lookup) -> Tensor:  # type: ignore[override]
        return lookup.read(unshared(ids))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        anchor, ids, ctx.lookup = inputs
        ctx.save_for_backward(anchor, ids)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        anchor, ids = ctx.saved_tensors
        if anchor.requires_grad:  # It may be frozen since the lookup.
            _Collected.apply(grad_outputs[0], ids, ctx.lookup)
        return (None,) * 3

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], anchor: Tensor, ids: Tensor, lookup: Lookup) -> tuple[Tensor, int]:  # type: ignore[override]
        if in_dims[0] is not None:
            raise lookup.refusal(NO_ENSEMBLE)
        return _Rows.apply(anchor, ids.movedim(in_dims[1], 0), lookup), 0  # type: ignore[return-value]


class _Collected(Function):
    """Hands gradients to the collector, on plain tensors whatever the transform; gives a zero."""

    @staticmethod
    def forward(grads: Tensor, ids: Tensor, lookup: Lookup) -> Tensor:  # type: ignore[override]
        lookup.collect(unshared(ids), unshared(grads))
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        return (None,) * 3

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], grads: Tensor, ids: Tensor, lookup: Lookup) -> None:  # type: ignore[override]
        raise lookup.refusal(
            "its rows have no gradients per sample, for a table collects sums only; differentiate the dense "
            "parameters without it, or freeze the module"
        )


def pool_rows(
    ids_N: Tensor,
    offsets: Tensor,
    mode: str,
    weights_N: Tensor | None,
    lookup: Lookup,
) -> Tensor:
    """Pools the rows of bags, `[B, D]`; takes ids `[N]`, offsets `[B + 1]` and, for a sum, weights `[N]`."""
    rows_ND = read_rows(ids_N, lookup)
    bags = offsets.shape[-1] - 1
    if mode == "max":
        return _maxima(rows_ND, _MaxPositions.apply(ids_N, offsets, lookup))  # type: ignore[arg-type]
    bag_N = bags_of(ids_N, offsets, lookup.table)
    counted_N = None if lookup.padding_idx is None else ids_N != lookup.padding_idx
    return sum_bags(rows_ND, bag_N, bags, mode == "mean", counted_N, weights_N)  # type: ignore[arg-type]


def bags_of(ids_N: Tensor, offsets: Tensor, table: Table) -> Tensor:
    """The bag of each id, `[N]`, under transforms and without."""
    if not is_transformed():
        return bag_of_each(ids_N, offsets)
    return _BagOfEach.apply(ids_N, offsets, Lookup(table))  # type: ignore[return-value]


def _maxima(rows_ND: Tensor, positions_BD: Tensor) -> Tensor:
    # `gather` refuses an index into no rows, and the clamped positions of empty bags are one.
    if rows_ND.shape[0] == 0:
        return torch.zeros(positions_BD.shape, dtype=torch.float32, device=rows_ND.device)
    return rows_ND.gather(0, positions_BD.clamp(min=0)).where(positions_BD >= 0, 0.0)


class _OfBags(Function):
    """Numbers that ids `[N]` and offsets `[B + 1]` give, without a gradient; of each sample of a `vmap` by itself."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @classmethod
    def of_samples(cls, info: Any, in_dims: tuple[Any, ...], ids: Tensor, offsets: Tensor, lookup: Lookup) -> Any:
        ids_VN, offsets_V = (
            each.unsqueeze(0).expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip((ids, offsets), in_dims, strict=False)
        )
        samples = zip(ids_VN, offsets_V, strict=True)
        return torch.stack([cls.apply(*sample, lookup) for sample in samples]), 0  # type: ignore[arg-type]


class _BagOfEach(_OfBags):
    """The bag of each id, `[N]`."""

    @staticmethod
    def forward(ids: Tensor, offsets: Tensor, lookup: Lookup) -> Tensor:  # type: ignore[override]
        check_offsets(lookup.table.name, ids, offsets)
        return bag_of_each(ids, offsets)

    @staticmethod
    def vmap(*args: Any) -> Any:  # type: ignore[override]
        return _BagOfEach.of_samples(*args)


class _MaxPositions(_OfBags):
    """The position of the id that holds each maximum, `[B, D]`, or -1."""

    @staticmethod
    def forward(ids: Tensor, offsets: Tensor, lookup: Lookup) -> Tensor:  # type: ignore[override]
        table = lookup.table
        return operators.emb_bag(table.handle, ids, offsets, table.dim, operators.MAX, None, lookup.padding_idx)[1]

    @staticmethod
    def vmap(*args: Any) -> Any:  # type: ignore[override]
        return _MaxPositions.of_samples(*args)
