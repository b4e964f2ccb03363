"""One exchange of ids and rows between the ranks, and of gradients on the way back.

Shape suffixes: N ids, U distinct ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.ops.collecting import collect, merges_here
from recstore_ops.sharding.exchange import Exchange, Layout, Requests
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
        note: a number that every rank sends to the others.

    Attributes:
        exchange: the way of ids, rows and gradients.
        received: the rows asked for, float32 in `exchange.asked_layout`.
        served: the rows that this rank sent, in `exchange.served_layout`; none once no rank asks for them any more.
        shard: whose group exchanges ids and rows.
        number: of the lookup within `sharding.join`.
        trained: whether each table collects gradients, the same on all ranks.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        asked: Sequence[Tensor],
        paddings: Sequence[int | None],
        inserts: Sequence[bool],
        shard: Shard,
        note: int = 0,
    ) -> None:
        self._tables = tables
        self._paddings = paddings
        self._inserts = inserts
        self.shard = shard
        self._places: Tensor | None = None
        self._rows: list[Tensor] | None = None
        self.number = 0
        self.served: Tensor | None = None
        self.note_frozen()

        def ask() -> Requests:
            for table, ids_N in zip(tables, asked, strict=True):
                _check_bounds(table, ids_N)
            return Requests.of(asked, shard.world)

        dims = [table.dim for table in tables]
        self.exchange = Exchange(shard, ask, [table.table_id for table in tables], dims, note)
        self.received = self.exchange.rows(self.read)

    def note_frozen(self) -> None:
        """Looks which tables are frozen now."""
        self.trained = [table.requires_grad for table in self._tables]

    @property
    def names(self) -> list[str]:
        """The names of the tables."""
        return [table.name for table in self._tables]

    @property
    def kind(self) -> frozenset[int]:
        """The numbers of the tables."""
        return frozenset(table.table_id for table in self._tables)

    @property
    def anchor(self) -> Tensor:
        """The tensor that puts the lookup on autograd's tape, unless all tables are frozen."""
        # The anchor of a frozen table would keep the rows of all others off the tape.
        return max(self._tables, key=lambda table: table.requires_grad).anchor

    @property
    def rows(self) -> list[Tensor]:
        """The rows asked for, float32, `[U, dim]` for each table, those of the first rank first."""
        if self._rows is None:
            self._rows = self.exchange.asked_layout.by_table(self.received)
        return self._rows

    def read(self) -> Tensor:
        """Reads the rows asked of this rank, in `exchange.served_layout`."""
        layout, handles = self.exchange.served_layout, [table.handle for table in self._tables]
        for number, (table, inserts) in enumerate(zip(self._tables, self._inserts, strict=True)):
            if inserts:
                # Rows are made before they are read, so that their places go into the step.
                ids_U = operators.unique(self.exchange.ids_of(number))[0]
                operators.hashtable_lookup(table.handle, ids_U, table.dim, True)
        served, self._places = operators.emb_read_ranks(handles, self.exchange.ids, layout.counts, layout.dims)
        self.served = served
        return served

    def accept(self, gradients: Sequence[Tensor]) -> None:
        """Sends the gradients of trained rows to their owners, and collects those that come, none at all too."""
        numbers = self.trained_numbers
        on_cpu = [gradients[number].to("cpu", torch.float32) for number in numbers]
        self.accept_flat(self.exchange.asked_layout.of_tables(numbers).flat(on_cpu))

    @property
    def trained_numbers(self) -> list[int]:
        """The numbers of the trained tables."""
        return [number for number, is_trained in enumerate(self.trained) if is_trained]

    def accept_flat(self, gradients: Tensor) -> None:
        """The same of gradients that lie in `exchange.asked_layout` of the trained tables."""
        numbers = self.trained_numbers
        tables = [self._tables[number] for number in numbers]
        checks = any(table.config.nan_policy == "error" for table in tables)
        received, is_fine = self.exchange.gradients(gradients, numbers, checks)
        layout = self.exchange.served_layout.of_tables(numbers)
        # Only then may some rank refuse the step. All other steps spare the ranks a question.
        if not is_fine:
            for table, rows in zip(tables, layout.by_table(received), strict=True):
                table.note_exchanged(rows)
        self._reduce(received, layout, tables)
        if merges_here():
            for number, rows in zip(numbers, layout.by_table(received), strict=True):
                table, ids_U = self._tables[number], self.exchange.ids_of(number)
                collect(table.collector, table.handle, ids_U, rows, self._paddings[number])
            return
        self._collect(received, layout, numbers)

    def _reduce(self, received: Tensor, layout: Layout, tables: list[Table]) -> None:
        means = [table.shard is not None and table.shard.grad_reduce == "mean" for table in tables]
        if all(means):
            received.div_(self.shard.world)
        elif any(means):
            by_table = layout.by_table(received)
            parts = [rows.div_(self.shard.world) if mean else rows for rows, mean in zip(by_table, means, strict=True)]
            received.copy_(layout.flat(parts))

    def _collect(self, received: Tensor, layout: Layout, numbers: list[int]) -> None:
        ids, places = self.exchange.ids, self._places
        if places is not None and len(numbers) < len(self._tables):
            counts = self.exchange.served_layout.counts
            chosen = [at for at in range(len(counts)) if at % len(self._tables) in numbers]
            # The places of each rank and table end with their own tag.
            of_places = places.split([each + operators.PLACES_TAG for each in counts])
            ids, places = (
                torch.cat([pieces[at] for at in chosen]) if chosen else pieces[0][:0]
                for pieces in (ids.split(counts), of_places)
            )
        padded = [at for at, number in enumerate(numbers) if self._paddings[number] is not None]
        tables = [self._tables[number] for number in numbers]
        if not tables:
            return
        operators.accept_rank_grads(
            [table.collector for table in tables],
            [table.handle for table in tables],
            ids,
            layout.counts,
            received,
            layout.dims,
            padded,
            [self._paddings[numbers[at]] for at in padded],
            places,
        )


def shard_of_tables(tables: Sequence[Table]) -> Shard:
    """The shard of sharded tables of one group."""
    shard = tables[0].shard
    assert shard is not None, "only sharded tables are exchanged"
    return shard


def _check_bounds(table: Table, ids_N: Tensor) -> None:
    """Refuses an id that the table's owner would refuse, before anything is sent."""
    size = table.config.num_embeddings
    if size is None or ids_N.numel() == 0:
        return
    least, most = ids_N.aminmax()
    if not 0 <= int(least) <= int(most) < size:
        # As uint8: `argmax` takes no bool.
        position = int(((ids_N < 0) | (ids_N >= size)).to(torch.uint8).argmax())
        raise IndexError(
            f'table "{table.name}": id {int(ids_N[position])} at position {position} is outside [0, {size})'
        )
