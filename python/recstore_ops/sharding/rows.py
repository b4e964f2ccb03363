"""Lookups in tables that are sharded over the ranks: requests for several tables go out in one exchange.

Shape suffixes: N ids, U distinct ids, D dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from recstore_ops.ops import operators
from recstore_ops.ops.operators import eager_only
from recstore_ops.ops.traced_regions import CollectingFunction
from recstore_ops.sharding.exchange import tell_failure
from recstore_ops.sharding.join import Joining, joining_of
from recstore_ops.sharding.lookup import Lookup, shard_of_tables
from recstore_ops.sharding.pending import LookupKey, take_pending
from recstore_ops.sharding.statistics import timed
from recstore_ops.sharding.step import compare_ranks
from recstore_ops.sparse.transforms import is_batched, is_transformed, plain, without_transforms
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import Table


@dataclass(frozen=True, eq=False)
class Request:
    """Ids that are looked up in a table.

    Attributes:
        table: sharded over the ranks.
        ids: int64, of any shape and on any device.
        padding_idx: an id that gets no gradient; the same in all requests of a table.
        inserts: whether ids without a row get one.
    """

    table: Table
    ids: Tensor
    padding_idx: int | None = None
    inserts: bool = False


class Rows(NamedTuple):
    """The result of a request: the rows of distinct ids, and the row of each id.

    Attributes:
        rows: float32, `[U, dim]`, on the device of the ids, with a gradient.
        places: the row of each id, int64, in the shape of the ids and on their device.
        padding_place: the row of `padding_idx`; `None` if it does not occur.
    """

    rows: Tensor
    places: Tensor
    padding_place: int | None


@eager_only
def sharded_rows(requests: Sequence[Request]) -> list[Rows]:
    """Looks up rows in sharded tables of one group, all in one exchange. All ranks call it together.

    Args:
        requests: one or more; those of one table share its rows.

    Returns:
        The rows of each request.

    Raises:
        IndexError: an id outside `[0, num_embeddings)`; names table, id and position.
        RuntimeError: a table was dropped, another rank failed, or `torch.func.vmap` goes over ids.
    """
    shard = shard_of_tables([request.table for request in requests])
    if any(is_batched(request.ids) for request in requests):
        raise _per_sample([request.table.name for request in requests])
    if is_transformed():
        # No `vmap` goes over these ids, so each is the plain tensor that it wraps. Only that can be sent.
        requests = [replace(request, ids=plain(request.ids)) for request in requests]
    lookup = _looked_up(requests, shard)
    rows: Any = _ShardedRows.apply(lookup.anchor, lookup)
    return _Batch(requests).answers(rows, lookup)


@eager_only
def sharded_bags(requests: Sequence[Request], offsets: Tensor) -> Tensor | None:
    """Sums the rows of bags in sharded tables of one group, all in one exchange. All ranks call it together.

    Args:
        requests: one a feature, without a `padding_idx`.
        offsets: the start of each bag of the first feature, then of the second, and so on; at the end, the end of the
            last bag.

    Returns:
        `[bags, dims of all features]`; `None`, before anything was exchanged, for what `sharded_rows` is needed for:
        ids on other devices, transforms of `torch.func`, and tables of which some are frozen.
    """
    tables = [request.table for request in requests]
    is_elsewhere = any(not request.ids.is_cpu or is_batched(request.ids) for request in requests)
    # The sums of all tables lie in one tensor, which requires a gradient as a whole or not at all.
    if is_elsewhere or is_transformed() or len({table.requires_grad for table in tables}) > 1:
        return None
    lookup = _looked_up(requests, shard_of_tables(tables))
    return _ShardedBags.apply(lookup.anchor, lookup, _Batch(requests).bags(offsets, lookup))  # type: ignore[return-value]


def _looked_up(requests: Sequence[Request], shard: Shard) -> Lookup:
    with timed("exposed_seconds"), without_transforms():
        joining = joining_of(shard)
        if joining is None:
            lookup = take_pending(key_of(requests), shard) or make_lookup(requests, shard)
        else:
            lookup = _look_up_within_join(requests, shard, joining)
    lookup.served = None  # Not to be kept until backward.
    # A lookup that was begun ahead noted this then, and its tables may have been frozen or thawed since.
    lookup.note_frozen()
    return lookup


class _Bags(NamedTuple):
    """Bags of features, as the operators take them.

    Attributes:
        tables: the number of each feature's table.
        places: of each id.
        offsets: of the bags.
    """

    tables: list[int]
    places: Tensor
    offsets: Tensor


class _Batch:
    """The requests of one lookup, put together by table."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.tables = list({request.table.table_id: request.table for request in requests}.values())
        self._numbers = {table.table_id: number for number, table in enumerate(self.tables)}

    def of(self, table: Table) -> list[Request]:
        """The requests of one table."""
        return [request for request in self.requests if request.table.table_id == table.table_id]

    def ids_of(self, table: Table) -> Tensor:
        """The ids of one table, int64 `[N]` on the CPU."""
        parts = [_on_cpu(request.ids) for request in self.of(table)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bags(self, offsets: Tensor, lookup: Lookup) -> _Bags:
        """The bags of the requests, one a feature."""
        places = lookup.exchange.asked.places
        if len(self.tables) < len(self.requests):
            places = torch.cat(self._places(places))
        return _Bags([self._numbers[request.table.table_id] for request in self.requests], places, offsets)

    def _places(self, places: Tensor) -> list[Tensor]:
        """The places of each request, of those of all tables."""
        in_order = [(number, request) for number, request in enumerate(self.requests)]
        # The exchange has ids table by table. The sort is stable, so requests of one table stay in their order.
        in_order.sort(key=lambda pair: self._numbers[pair[1].table.table_id])
        parts = places.split([request.ids.numel() for _, request in in_order])
        by_number = {number: part for (number, _), part in zip(in_order, parts, strict=True)}
        return [by_number[number] for number in range(len(self.requests))]

    def answers(self, rows: Sequence[Tensor], lookup: Lookup) -> list[Rows]:
        """Gives each request its rows and places."""
        answers = []
        for request, places in zip(self.requests, self._places(lookup.exchange.asked.places), strict=True):
            number, device = self._numbers[request.table.table_id], request.ids.device
            padding_place = _padding_place(_on_cpu(request.ids), places, request.padding_idx)
            answers.append(Rows(rows[number].to(device), places.view(request.ids.shape).to(device), padding_place))
        return answers


def _padding_place(ids_N: Tensor, places_N: Tensor, padding_idx: int | None) -> int | None:
    if padding_idx is None:
        return None
    found = places_N[ids_N == padding_idx]
    return int(found[0]) if found.numel() > 0 else None


def _look_up_within_join(requests: Sequence[Request], shard: Shard, joining: Joining) -> Lookup:
    batch = _Batch(requests)
    first = [batch.of(table)[0] for table in batch.tables]
    number = joining.look_up(
        batch.tables, [request.padding_idx for request in first], [request.inserts for request in first]
    )
    with joining.announced():
        lookup = make_lookup(requests, shard)
    lookup.number = number
    return lookup


def make_lookup(requests: Sequence[Request], shard: Shard, note: int = 0) -> Lookup:
    """Looks up requests over the group of `shard`. Every rank also sends a number to the others."""
    batch = _Batch(requests)
    first = [batch.of(table)[0] for table in batch.tables]
    return Lookup(
        batch.tables,
        [batch.ids_of(table) for table in batch.tables],
        [request.padding_idx for request in first],
        [request.inserts for request in first],
        shard,
        note,
    )


def key_of(requests: Sequence[Request]) -> LookupKey:
    """The key of a lookup: the number of each table and the ids asked of it, in order."""
    return tuple((request.table.table_id, request.ids.reshape(-1)) for request in requests)


def check_other_ranks(tables: Sequence[Table]) -> None:
    """Checks, before a step in tables, that the sharded ones can take it on all ranks; otherwise none takes it.

    All ranks call it together. On a rank whose gradients are not finite it returns: its own step reports the error.

    Raises:
        RuntimeError: another rank has such gradients, and will refuse its step.
    """
    sharded = [table for table in tables if table.is_sharded]
    if not sharded:
        return
    joining = joining_of(shard_of_tables(sharded))
    if joining is None:
        return compare_ranks(sharded)
    joining.step(sharded)
    with joining.announced():
        compare_ranks(sharded)


@contextmanager
def failing_together(tables: Sequence[Table]) -> Iterator[None]:
    """Goes before a lookup in sharded tables: an error within it is one of the lookup, on all ranks."""
    try:
        yield
    except Exception:
        shard, distinct = shard_of_tables(tables), list({table.table_id for table in tables})
        joining = joining_of(shard)
        # Ranks without batches wait for an announcement, the others for a message of the exchange: one of the two, not
        # both.
        if joining is not None:
            joining.fail_lookup()
            raise
        tell_failure(shard, distinct)
        raise


def _on_cpu(ids: Tensor) -> Tensor:
    flat = ids.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.int64) if flat.dtype == torch.uint64 else flat


class _OfRanks(CollectingFunction):
    """A function of a lookup in sharded tables."""

    @staticmethod
    def named(ctx: Any) -> str:
        return ", ".join(ctx.lookup.names)


class _ShardedRows(_OfRanks):
    """Puts the rows of a lookup on autograd's tape: one `[U, D]` for each table."""

    @staticmethod
    def forward(anchor: Tensor, lookup: Lookup) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(lookup.rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.lookup = inputs
        # Else the rows of a frozen table would require a gradient, since another table's anchor is on the tape.
        ctx.mark_non_differentiable(
            *(rows for rows, trained in zip(output, ctx.lookup.trained, strict=True) if not trained)
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None]:
        with timed("exposed_seconds"):
            _Accepted.apply(ctx.lookup, ctx.lookup.accept, *grad_outputs)
        return None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], anchor: Tensor, lookup: Lookup) -> None:  # type: ignore[override]
        raise _per_sample(lookup.names)


class _ShardedBags(_OfRanks):
    """Puts the sums of the bags of a lookup on autograd's tape: `[B, dims]`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup, bags: _Bags) -> Tensor:  # type: ignore[override]
        ctx.lookup, ctx.bags = lookup, bags
        layout, received = lookup.exchange.asked_layout, lookup.received
        lookup.received = received[:0]  # Not to be kept until backward.
        return operators.pool_rank_rows(received, layout.counts, layout.dims, *bags)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None]:
        with timed("exposed_seconds"):
            _Accepted.apply(ctx.lookup, lambda grads: _accept_bags(ctx.lookup, ctx.bags, *grads), *grad_outputs)
        return None, None, None


def _accept_bags(lookup: Lookup, bags: _Bags, gradients: Tensor) -> None:
    layout = lookup.exchange.asked_layout
    lookup.accept_flat(
        operators.spread_rank_grads(gradients.to("cpu", torch.float32), layout.counts, layout.dims, *bags)
    )


class _Accepted(Function):
    """Sends the gradients of a lookup, on plain tensors whatever the transform of `torch.func`; gives a zero."""

    @staticmethod
    def forward(lookup: Lookup, accept: Callable[[Sequence[Tensor]], None], *grads: Tensor) -> Tensor:  # type: ignore[override]
        joining = joining_of(lookup.shard)
        if joining is None:
            accept(grads)
        else:
            joining.accept(lookup, lambda: accept(grads))
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], lookup: Lookup, accept: Any, *grads: Tensor) -> None:  # type: ignore[override]
        raise _per_sample(lookup.names)


def _per_sample(names: list[str]) -> RuntimeError:
    return RuntimeError(
        f"tables {names} are sharded, and no vmap goes over their ids or the gradients of their rows; look the rows of "
        "all samples up before it"
    )
