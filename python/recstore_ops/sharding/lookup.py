"""Lookups in tables that are sharded over the ranks: several tables in one exchange, gradients on the way back.

Shape suffixes: N ids, U distinct ids, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from recstore_ops.autograd import collect
from recstore_ops.ops import operators
from recstore_ops.ops.operators import eager_only
from recstore_ops.sharding.exchange import Asked, Exchange, Status, exchange_counts
from recstore_ops.sharding.pending import LookupKey, take_pending
from recstore_ops.sharding.statistics import timed

if TYPE_CHECKING:
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
        RuntimeError: a table was dropped, or another rank failed.
    """
    shard = shard_of_tables([request.table for request in requests])
    with timed("exposed_seconds"):
        lookup = take_pending(key_of(requests), shard) or make_lookup(requests, shard)
    lookup.served = []  # Not to be kept until backward.
    rows: Any = _ShardedRows.apply(requests[0].table.anchor, lookup)
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


class Lookup:
    """One exchange of ids and rows. All ranks make it together.

    Args:
        tables: distinct, of one group.
        asked: the ids asked of each table, int64 `[N]` on the CPU.
        paddings: the id of each table that gets no gradient.
        inserts: whether ids of each table without a row get one.
        shard: whose group exchanges ids and rows.

    Attributes:
        exchange: the way of ids, rows and gradients.
        rows: float32, `[U, dim]` for each table, in the order of `exchange.asked`.
        served: the rows that this rank sent, in the order of `exchange.ids`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        asked: Sequence[Tensor],
        paddings: Sequence[int | None],
        inserts: Sequence[bool],
        shard: Shard,
    ) -> None:
        self._tables = tables
        self._paddings = paddings
        self._inserts = inserts
        self._places: list[Tensor] = []
        self.served: list[Tensor] = []

        def ask() -> list[Asked]:
            for table, ids_N in zip(tables, asked, strict=True):
                _check_bounds(table, ids_N)
            return [Asked.of(ids_N, shard.world) for ids_N in asked]

        self.exchange = Exchange(shard, ask, len(tables))
        self.rows = self.exchange.rows(self.read, [table.dim for table in tables])

    def read(self) -> list[Tensor]:
        """Reads the rows asked of this rank, `[U, dim]` for each table."""
        self._places, self.served = [], []
        for table, ids_U, inserts in zip(self._tables, self.exchange.ids, self._inserts, strict=True):
            if inserts:
                operators.hashtable_lookup(table.handle, operators.unique(ids_U)[0], table.dim, True)
            read, places = operators.emb_read_places(table.handle, ids_U, table.dim)
            self.served.append(read)
            self._places.append(places)
        return self.served

    def accept(self, gradients: Sequence[Tensor]) -> None:
        """Sends the gradients of the rows to their owners, and collects those that come, none at all too."""
        on_cpu = [gradient.to("cpu", torch.float32) for gradient in gradients]
        received = self.exchange.gradients(on_cpu)
        each = zip(self._tables, self.exchange.ids, received, self._places, self._paddings, strict=True)
        for table, ids_U, gradient_UD, places, padding_idx in each:
            table.note_received(gradient_UD)
            collect(table.collector, table.handle, ids_U, _reduced(table, gradient_UD), padding_idx, places)


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


@contextmanager
def failing_together(tables: Sequence[Table]) -> Iterator[None]:
    """Goes before a lookup in sharded tables: an error within it is one of the lookup, on all ranks."""
    try:
        yield
    except Exception:
        shard, distinct = shard_of_tables(tables), {table.table_id for table in tables}
        exchange_counts(shard, [[0] * len(distinct)] * shard.world, Status.FAILED)
        raise


def shard_of_tables(tables: Sequence[Table]) -> Shard:
    """The shard of sharded tables of one group."""
    shard = tables[0].shard
    assert shard is not None, "only sharded tables are exchanged"
    return shard


def _reduced(table: Table, gradient: Tensor) -> Tensor:
    shard = shard_of_tables([table])
    return gradient.div_(shard.world) if shard.grad_reduce == "mean" else gradient


def _check_bounds(table: Table, ids_N: Tensor) -> None:
    """Refuses an id that the table's owner would refuse, before anything is sent."""
    size = table.config.num_embeddings
    if size is None or ids_N.numel() == 0:
        return
    position = int(((ids_N < 0) | (ids_N >= size)).to(torch.uint8).argmax())
    if not 0 <= int(ids_N[position]) < size:
        raise IndexError(
            f'table "{table.name}": id {int(ids_N[position])} at position {position} is outside [0, {size})'
        )


def _on_cpu(ids: Tensor) -> Tensor:
    flat = ids.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.int64) if flat.dtype == torch.uint64 else flat


class _ShardedRows(Function):
    """Puts the rows of a lookup on autograd's tape: one `[U, D]` for each table."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.lookup = lookup
        return tuple(lookup.rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None]:
        with timed("exposed_seconds"):
            ctx.lookup.accept(grad_outputs)
        return None, None


__all__ = ["Lookup", "Request", "Rows", "failing_together", "key_of", "make_lookup", "shard_of_tables", "sharded_rows"]
