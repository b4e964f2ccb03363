"""One exchange of ids and rows between the ranks, and of gradients on the way back.

Shape suffixes: N ids, U distinct ids, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.ops.collecting import collect
from recstore_ops.sharding.exchange import Asked, Exchange
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import Table


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
        shard: whose group exchanges ids and rows.
        number: of the lookup within `sharding.join`.
        trained: whether each table collects gradients; it must be the same on all ranks.
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
        self.shard = shard
        self._places: list[Tensor] = []
        self.number = 0
        self.served: list[Tensor] = []
        self.note_frozen()

        def ask() -> list[Asked]:
            for table, ids_N in zip(tables, asked, strict=True):
                _check_bounds(table, ids_N)
            return [Asked.of(ids_N, shard.world) for ids_N in asked]

        self.exchange = Exchange(shard, ask, len(tables))
        self.rows = self.exchange.rows(self.read, [table.dim for table in tables])

    def note_frozen(self) -> None:
        """Looks which tables are frozen now."""
        self.trained = [table.requires_grad for table in self._tables]

    @property
    def names(self) -> list[str]:
        """The names of the tables."""
        return [table.name for table in self._tables]

    @property
    def anchor(self) -> Tensor:
        """What puts the lookup on autograd's tape, unless all tables are frozen."""
        return max(self._tables, key=lambda table: table.requires_grad).anchor

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
        """Sends the gradients of trained rows to their owners, and collects those that come, none at all too."""
        numbers = [number for number, is_trained in enumerate(self.trained) if is_trained]
        on_cpu = [gradients[number].to("cpu", torch.float32) for number in numbers]
        received = self.exchange.gradients(on_cpu, numbers)
        for number, gradient_UD in zip(numbers, received, strict=True):
            table, ids_U, places = self._tables[number], self.exchange.ids[number], self._places[number]
            table.note_received(gradient_UD)
            gradient_UD = _reduced(table, gradient_UD)
            collect(table.collector, table.handle, ids_U, gradient_UD, self._paddings[number], places)


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
