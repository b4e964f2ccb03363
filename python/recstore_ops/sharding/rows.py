"""Lookups in tables that are sharded over the ranks: requests for several tables go out in one exchange.

Shape suffixes: N ids, U distinct ids, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from recstore_ops.ops.operators import eager_only
from recstore_ops.sharding.exchange import Status, exchange_counts
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
    """What a request gets: the rows of distinct ids, and which is whose.

    Attributes:
        rows: float32, `[U, dim]`, on the device of the ids; they carry a gradient.
        places: the row of each id, int64, in the shape of the ids and on their device.
        padding_place: the row of `padding_idx`; `None` where it does not occur.
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
        What each request gets.

    Raises:
        IndexError: an id outside `[0, num_embeddings)`; names table, id and position.
        RuntimeError: a table was dropped, another rank failed, or `torch.func.vmap` goes over ids.
    """
    shard = shard_of_tables([request.table for request in requests])
    if any(is_batched(request.ids) for request in requests):
        raise _per_sample([request.table.name for request in requests])
    if is_transformed():
        requests = [replace(request, ids=plain(request.ids)) for request in requests]
    with timed("exposed_seconds"), without_transforms():
        joining = joining_of(shard)
        if joining is None:
            lookup = take_pending(key_of(requests), shard) or make_lookup(requests, shard)
        else:
            lookup = _look_up_within_join(requests, shard, joining)
    lookup.served = []  # Not to be kept until backward.
    lookup.note_frozen()
    rows: Any = _ShardedRows.apply(lookup.anchor, lookup)
    return _Batch(requests).answers(rows, lookup)


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
        return torch.cat([_on_cpu(request.ids) for request in self.of(table)])

    def answers(self, rows: Sequence[Tensor], lookup: Lookup) -> list[Rows]:
        """Gives each request its rows and places."""
        taken = [0] * len(self.tables)
        answers = []
        for request in self.requests:
            number, size = self._numbers[request.table.table_id], request.ids.numel()
            places = lookup.exchange.asked[number].places[taken[number] : taken[number] + size]
            taken[number] += size
            device = request.ids.device
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


def make_lookup(requests: Sequence[Request], shard: Shard) -> Lookup:
    """Looks up requests over the group of `shard`."""
    batch = _Batch(requests)
    first = [batch.of(table)[0] for table in batch.tables]
    return Lookup(
        batch.tables,
        [batch.ids_of(table) for table in batch.tables],
        [request.padding_idx for request in first],
        [request.inserts for request in first],
        shard,
    )


def key_of(requests: Sequence[Request]) -> LookupKey:
    """What tells a lookup: the number of each table and the ids asked of it, in order."""
    return tuple((request.table.table_id, request.ids.reshape(-1)) for request in requests)


def check_other_ranks(tables: Sequence[Table]) -> None:
    """Goes before a step in tables: those that are sharded take theirs on all ranks, or on none.

    All ranks call it together. On a rank whose gradients are not finite it returns: its own step tells what is wrong.

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
        shard, distinct = shard_of_tables(tables), {table.table_id for table in tables}
        joining = joining_of(shard)
        if joining is not None:
            joining.fail_lookup()
            raise
        exchange_counts(shard, [[0] * len(distinct)] * shard.world, Status.FAILED)
        raise


def _on_cpu(ids: Tensor) -> Tensor:
    flat = ids.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.int64) if flat.dtype == torch.uint64 else flat


class _ShardedRows(Function):
    """Puts the rows of a lookup on autograd's tape: one `[U, D]` for each table."""

    @staticmethod
    def forward(anchor: Tensor, lookup: Lookup) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(lookup.rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.lookup = inputs
        ctx.mark_non_differentiable(
            *(rows for rows, trained in zip(output, ctx.lookup.trained, strict=True) if not trained)
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None]:
        with timed("exposed_seconds"):
            _Accepted.apply(ctx.lookup, *grad_outputs)
        return None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], anchor: Tensor, lookup: Lookup) -> None:  # type: ignore[override]
        raise _per_sample(lookup.names)


class _Accepted(Function):
    """Sends the gradients of a lookup, on plain tensors whatever the transform of `torch.func`; gives a zero."""

    @staticmethod
    def forward(lookup: Lookup, *grads: Tensor) -> Tensor:  # type: ignore[override]
        joining = joining_of(lookup.shard)
        if joining is None:
            lookup.accept(grads)
        else:
            joining.accept(lookup, grads)
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], lookup: Lookup, *grads: Tensor) -> None:  # type: ignore[override]
        raise _per_sample(lookup.names)


def _per_sample(names: list[str]) -> RuntimeError:
    return RuntimeError(
        f"tables {names} are sharded, and no vmap goes over their ids or the gradients of their rows; look the rows of "
        "all samples up before it"
    )
