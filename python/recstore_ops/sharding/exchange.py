"""The exchange of one batch: which ids every rank asks of every other, and the way of rows and gradients.

Shape suffixes: N ids, U distinct ids, W ranks, T tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.sharding.layout import FLAGS, Layout
from recstore_ops.sharding.messages import exchange_messages
from recstore_ops.sharding.statistics import count
from recstore_ops.table.finite import is_finite
from recstore_ops.table.shard import Shard

_INT64_BYTES = 8


class Status(IntEnum):
    """How a rank fares, as it tells the others."""

    FINE = 0
    FAILED = 1
    UNWANTED = 2
    """It has no use for a lookup that was begun ahead."""
    NOT_FINITE = 3
    """Among the gradients that it sends some are not finite."""


@dataclass(frozen=True)
class Asked:
    """What a rank asks of several tables.

    Attributes:
        ids: int64, distinct for each table; those of the first rank first, of it one table after the other, rising.
        counts_WT: how many of each table, by rank.
        places: the place of each id of the batch among those of its table, int64, `[N]`, one table after the other.
    """

    ids: Tensor
    counts_WT: list[list[int]]
    places: Tensor

    @classmethod
    def of(cls, ids: Sequence[Tensor], world: int) -> "Asked":
        """What the ids of each table in a batch, int64 `[N]` on the CPU, ask of `world` ranks."""
        splits = [0]
        for ids_N in ids:
            splits.append(splits[-1] + ids_N.numel())
        together = ids[0] if len(ids) == 1 else torch.cat(list(ids))
        distinct, counts, places = operators.rank_requests(together, splits, world)
        return cls(distinct, counts.view(world, len(ids)).tolist(), places)


class Exchange:
    """What all ranks ask of each other in one batch; rows and gradients then take the same way.

    All ranks make it together, each with the same tables.

    Args:
        shard: of the tables.
        ask: gives what this rank asks. It may raise: then the others raise too.
        tables: the numbers of the tables.
        dims: of the tables.
        note: a number that every rank tells the others.

    Attributes:
        asked: what this rank asks.
        ids: what is asked of this rank, int64, in the same order.
        asked_layout: of the rows asked for.
        served_layout: of the rows asked of this rank.
        notes: what each rank told.

    Raises:
        RuntimeError: another rank failed.
    """

    def __init__(
        self, shard: Shard, ask: Callable[[], Asked], tables: Sequence[int], dims: list[int], note: int = 0
    ) -> None:
        self._shard = shard
        try:
            self.asked = ask()
        except Exception:
            tell_failure(shard, tables)
            raise
        counts_WT = self.asked.counts_WT
        bodies = self.asked.ids.view(torch.uint8).split([_INT64_BYTES * sum(counts) for counts in counts_WT])
        words = [[Status.FINE, note, *counts] for counts in counts_WT]
        came = exchange_messages(shard, _kind(tables), words, bodies, "id_bytes")
        raise_if_failed([words[0] for words in came.words], "a lookup")
        self.notes = [words[1] for words in came.words]
        self.ids = torch.cat(came.bodies).view(torch.int64)
        self.asked_layout = Layout(counts_WT, dims)
        self.served_layout = Layout([words[2:] for words in came.words], dims)
        count(exchanges=1)

    def go_on_over(self, shard: Shard) -> None:
        """Lets gradients go over the group of another shard of the same ranks."""
        self._shard = shard

    def ids_of(self, table: int) -> Tensor:
        """What is asked of this rank of one table, those of the first rank first."""
        pieces = self.ids.split(self.served_layout.counts)
        return torch.cat(pieces[table :: len(self.served_layout.dims)])

    def rows(self, read: Callable[[], Tensor]) -> Tensor:
        """Sends the rows asked of this rank and returns those it asked for, in `asked_layout`.

        Args:
            read: gives the rows of `ids`, float32 in `served_layout`. It may raise: then the others raise too.

        Raises:
            RuntimeError: another rank failed.
        """
        try:
            rows = read()
        except Exception:
            self._move(self.served_layout.empty(), self.served_layout, self.asked_layout, "row_bytes", Status.FAILED)
            raise
        moved, flags = self._move(rows, self.served_layout, self.asked_layout, "row_bytes", Status.FINE)
        raise_if_failed(flags, "reading rows")
        return moved

    def gradients(self, gradients: Tensor, tables: Sequence[int], checks: bool) -> tuple[Tensor, bool]:
        """Sends the gradients of some tables, float32 in `asked_layout` of these, to the owners of their rows.

        Args:
            gradients: float32.
            tables: their numbers among those of the exchange.
            checks: whether it matters if they are finite; the same on all ranks.

        Returns:
            Those that came, in `served_layout` of the tables, and whether what all ranks sent to any is finite, as far
            as it matters: the same on all ranks.
        """
        is_fine = not checks or is_finite(gradients.to(self._shard.wire_dtype))
        sent, received = self.asked_layout.of_tables(tables), self.served_layout.of_tables(tables)
        status = Status.FINE if is_fine else Status.NOT_FINITE
        moved, flags = self._move(gradients, sent, received, "gradient_bytes", status)
        return moved, Status.NOT_FINITE not in flags

    def _move(
        self, values: Tensor, sent: Layout, received: Layout, counted_as: str, status: Status
    ) -> tuple[Tensor, list[int]]:
        """Moves values in the type of the wire; returns those that came, and how each rank fares."""
        shard = self._shard
        if status is not Status.FINE:
            sent.set_flags(values, status)
        wire = values.to(shard.wire_dtype)
        sent_W, received_W = ([size * wire.element_size() for size in layout.sizes_W] for layout in (sent, received))
        moved = shard.all_to_all(wire.view(torch.uint8), sent_W, received_W).view(wire.dtype).to(torch.float32)
        flag_bytes = FLAGS * wire.element_size() * (shard.world - 1)
        count(count_bytes=flag_bytes, **{counted_as: sum(sent_W) - sent_W[shard.rank] - flag_bytes})
        return moved, received.flags_W(moved)


def _kind(tables: Sequence[int]) -> frozenset[int]:
    """The kind of messages about the ids of some tables."""
    return frozenset(tables)


def tell_failure(shard: Shard, tables: Sequence[int]) -> None:
    """Tells the other ranks, which look up in some tables, that this one cannot."""
    none = torch.empty(0, dtype=torch.uint8, device="cpu")
    words = [[Status.FAILED, 0, *([0] * len(tables))]] * shard.world
    exchange_messages(shard, _kind(tables), words, [none] * shard.world, "id_bytes")


def raise_if_failed(statuses: list[int], what: str) -> None:
    """Raises RuntimeError if a rank failed; names it."""
    if Status.FAILED in statuses:
        raise RuntimeError(f"{what} failed on rank {statuses.index(Status.FAILED)}; its own error tells why")
