"""The exchange of one batch: which ids every rank asks of every other, and the way of rows and gradients.

Shape suffixes: N ids, U distinct ids, W ranks, T tables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.sharding.statistics import count
from recstore_ops.table.checks import is_finite
from recstore_ops.table.shard import Shard

# What each rank tells each other: a few numbers and some bytes, in one exchange where they fit.
#
# How many bytes there are nobody knows before. So a message has room for about as many as the largest one before it
# had; where the room of any rank is too small, what does not fit goes in a second exchange. Every message has the size
# of its sender's largest one, so that all ranks know alike whether there is a second exchange, and how much room is
# next.

_WORD_BYTES = 8
_SIZES = 2
"""The words that a message begins with: its bytes, and those of its sender's largest one."""

_KEPT, _OUT_OF = 15, 16
"""The part of its room that is left to a message of which others were smaller."""

_rooms: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, int]] = WeakKeyDictionary()
"""How many bytes a message has room for, by group and kind; the same on all ranks."""


class Messages(NamedTuple):
    """The messages of all ranks.

    Attributes:
        words: the numbers, by rank.
        bodies: the bytes, by rank: uint8.
    """

    words: list[list[int]]
    bodies: list[Tensor]


def exchange_messages(
    shard: Shard, kind: Hashable, words: Sequence[Sequence[int]], bodies: Sequence[Tensor], counted_as: str
) -> Messages:
    """Sends each rank a message. All ranks call it together, with as many words each.

    Args:
        shard: whose ranks.
        kind: of the messages: those of one kind have about the same size.
        words: for each rank.
        bodies: for each rank, uint8; of a multiple of eight bytes.
        counted_as: what the bytes of bodies are counted as.
    """
    rooms = _rooms.setdefault(shard.group, {})
    room = rooms.get(kind, 0)
    sizes = [body.numel() for body in bodies]
    of_each = [[size, max(sizes), *own] for size, own in zip(sizes, words, strict=True)]
    heads = torch.tensor(of_each, dtype=torch.int64, device="cpu")
    sent = torch.zeros((shard.world, heads.shape[1] * _WORD_BYTES + room), dtype=torch.uint8, device="cpu")
    start = heads.shape[1] * _WORD_BYTES
    sent[:, :start] = heads.view(torch.uint8)
    for message, body in zip(sent, bodies, strict=True):
        message[start : start + min(room, body.numel())] = body[:room]
    bytes_W = [sent.shape[1]] * shard.world
    received = shard.all_to_all(sent.flatten(), bytes_W, bytes_W).view(sent.shape)
    heads_W = received[:, :start].contiguous().view(torch.int64).tolist()
    # Each rank knows the largest message of every sender, so all decide alike, without another exchange.
    most = max(head[1] for head in heads_W)
    came = [head[0] for head in heads_W]
    parts = [message[start : start + min(room, size)] for message, size in zip(received, came, strict=True)]
    if most > room:
        rest = _exchanged_rest(shard, [body[room:] for body in bodies], [max(0, size - room) for size in came])
        parts = [torch.cat(pair) for pair in zip(parts, rest, strict=True)]
    # Room grows at once and shrinks by a sixteenth: a single small batch must not cost the next one a second exchange.
    rooms[kind] = max(_with_room(most), room * _KEPT // _OUT_OF // _WORD_BYTES * _WORD_BYTES)
    foreign = sum(sizes) - sizes[shard.rank]
    filled = sum(min(room, size) for rank, size in enumerate(sizes) if rank != shard.rank)
    count(count_bytes=sent.shape[1] * (shard.world - 1) - filled, **{counted_as: foreign})
    return Messages([head[_SIZES:] for head in heads_W], parts)


def _exchanged_rest(shard: Shard, rest: list[Tensor], came: list[int]) -> tuple[Tensor, ...]:
    return shard.all_to_all(torch.cat(rest), [part.numel() for part in rest], came).split(came)


def _with_room(size: int) -> int:
    """An eighth more than a size, in whole words."""
    return -(-size * 9 // 8 // _WORD_BYTES) * _WORD_BYTES


# Where rows of several tables lie as ranks send them: for each rank one table after the other, and flags behind them.
#
# Shape suffixes: W ranks, T tables, U distinct ids.

FLAGS = 16
"""The elements behind the rows for each rank, as the operators have them: the first one is a flag."""


@dataclass(frozen=True)
class Layout:
    """As many rows of each rank and table, in one tensor of one dimension.

    Attributes:
        counts_WT: the rows of each table, by rank.
        dims: of the tables.
    """

    counts_WT: list[list[int]]
    dims: list[int]

    @cached_property
    def counts(self) -> list[int]:
        """The rows of each table of the first rank, then of the second, and so on."""
        return list(chain.from_iterable(self.counts_WT))

    @cached_property
    def sizes_W(self) -> list[int]:
        """The elements of each rank, flags included."""
        return [
            sum(count * dim for count, dim in zip(counts, self.dims, strict=True)) + FLAGS for counts in self.counts_WT
        ]

    @cached_property
    def ends_W(self) -> list[int]:
        """The place behind the elements of each rank."""
        return list(accumulate(self.sizes_W))

    def of_tables(self, numbers: Sequence[int]) -> Layout:
        """The same of some tables."""
        if len(numbers) == len(self.dims):
            return self
        return Layout([[counts[number] for number in numbers] for counts in self.counts_WT], self._of(numbers))

    def _of(self, numbers: Sequence[int]) -> list[int]:
        return [self.dims[number] for number in numbers]

    @property
    def runs_WR(self) -> list[list[tuple[int, int]]]:
        """Numbers of rows and their dims, by rank: one run if all dims are equal, else one a table."""
        if len(set(self.dims)) == 1:
            return [[(sum(counts), self.dims[0])] for counts in self.counts_WT]
        return [list(zip(counts, self.dims, strict=True)) for counts in self.counts_WT]

    def runs(self, flat: Tensor) -> list[list[Tensor]]:
        """The rows of each run, `[count, dim]`, by rank: views."""
        return [
            _cut(flat[end - size : end - FLAGS], runs)
            for runs, size, end in zip(self.runs_WR, self.sizes_W, self.ends_W, strict=True)
        ]

    def by_table(self, flat: Tensor) -> list[Tensor]:
        """Copies of the rows of each table, `[U, dim]`, those of the first rank first."""
        pieces = [
            _cut(flat[end - size : end - FLAGS], list(zip(counts, self.dims, strict=True)))
            for counts, size, end in zip(self.counts_WT, self.sizes_W, self.ends_W, strict=True)
        ]
        return [torch.cat(of_ranks) for of_ranks in zip(*pieces, strict=True)]

    def flat(self, by_table: Sequence[Tensor]) -> Tensor:
        """The same the other way round; flags are zero."""
        parts = [
            rows.split([counts[table] for counts in self.counts_WT]) if rows.numel() else (rows,) * len(self.counts_WT)
            for table, rows in enumerate(by_table)
        ]
        flags = torch.zeros(FLAGS, dtype=torch.float32, device="cpu")
        of_ranks = zip(*parts, strict=True) if parts else [()] * len(self.counts_WT)
        return torch.cat([part for of_rank in of_ranks for part in (*(rows.reshape(-1) for rows in of_rank), flags)])

    def empty(self) -> Tensor:
        """Zeros."""
        return torch.zeros(self.ends_W[-1], dtype=torch.float32, device="cpu")

    def set_flags(self, flat: Tensor, flag: int) -> None:
        """Sets the flag for each rank."""
        for end in self.ends_W:
            flat[end - FLAGS] = flag

    def flags_W(self, flat: Tensor) -> list[int]:
        """The flag of each rank."""
        return [int(flat[end - FLAGS]) for end in self.ends_W]


def _cut(flat: Tensor, runs: list[tuple[int, int]]) -> list[Tensor]:
    parts = flat.split([count * dim for count, dim in runs])
    return [part.view(count, dim) for part, (count, dim) in zip(parts, runs, strict=True)]


_INT64_BYTES = 8


class Status(IntEnum):
    """The status that a rank sends to the others."""

    FINE = 0
    FAILED = 1
    UNWANTED = 2
    """It has no use for a lookup that was begun ahead."""
    NOT_FINITE = 3
    """Among the gradients that it sends some are not finite."""


@dataclass(frozen=True)
class Requests:
    """The ids that a rank asks several tables for.

    Attributes:
        ids: int64, distinct for each table; those of the first rank first, of it one table after the other, rising.
        counts_WT: how many of each table, by rank.
        places: the place of each id of the batch among those of its table, int64, `[N]`, one table after the other.
    """

    ids: Tensor
    counts_WT: list[list[int]]
    places: Tensor

    @classmethod
    def of(cls, ids: Sequence[Tensor], world: int) -> Requests:
        """The request to `world` ranks for the ids of each table in a batch, int64 `[N]` on the CPU."""
        splits = [0]
        for ids_N in ids:
            splits.append(splits[-1] + ids_N.numel())
        together = ids[0] if len(ids) == 1 else torch.cat(list(ids))
        distinct, counts, places = operators.rank_requests(together, splits, world)
        return cls(distinct, counts.view(world, len(ids)).tolist(), places)


class Exchange:
    """The requests of all ranks to each other in one batch. Rows and gradients then take the same way.

    All ranks make it together, each with the same tables.

    Args:
        shard: of the tables.
        ask: returns the request of this rank. It may raise: then the others raise too.
        tables: the numbers of the tables.
        dims: of the tables.
        note: a number that every rank sends to the others.

    Attributes:
        asked: the request of this rank.
        ids: the ids that this rank is asked for, int64, in the same order.
        asked_layout: of the rows asked for.
        served_layout: of the rows asked of this rank.
        notes: the number that each rank sent.

    Raises:
        RuntimeError: another rank failed.
    """

    def __init__(
        self, shard: Shard, ask: Callable[[], Requests], tables: Sequence[int], dims: list[int], note: int = 0
    ) -> None:
        self._shard = shard
        try:
            self.asked = ask()
        except Exception:
            # The others wait in this exchange. Without a message from here they would wait until the group's
            # timeout.
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
        """The ids of one table that this rank is asked for, those of the first rank first."""
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
            # The sizes are agreed, so a failure takes the same way as rows would.
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
        # After rounding to the type of the wire: that is what the owner gets.
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
    """Reports to the other ranks, which look up in some tables, that this one cannot."""
    none = torch.empty(0, dtype=torch.uint8, device="cpu")
    words = [[Status.FAILED, 0, *([0] * len(tables))]] * shard.world
    exchange_messages(shard, _kind(tables), words, [none] * shard.world, "id_bytes")


def raise_if_failed(statuses: list[int], what: str) -> None:
    """Raises RuntimeError if a rank failed; names it."""
    if Status.FAILED in statuses:
        raise of_other_rank(f"{what} failed on rank {statuses.index(Status.FAILED)}; its own error tells why")


def of_other_rank(message: str) -> RuntimeError:
    """Returns the error of a rank that fails because another one does."""
    error = RuntimeError(message)
    error.is_of_other_rank = True  # type: ignore[attr-defined]
    return error
