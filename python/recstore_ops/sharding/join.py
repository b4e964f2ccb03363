"""`join`: ranks that have no more batches take part in the exchanges of those that go on.

Before each exchange all ranks announce to each other what they do. A rank that has no more batches announces that, on a
thread of its own, and then does what the others do, with no ids: it still has its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from enum import IntEnum
from threading import Thread
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable

from recstore_ops import _native
from recstore_ops.ops import operators
from recstore_ops.sharding.exchange import of_other_rank
from recstore_ops.sharding.lookup import Lookup, shard_of_tables
from recstore_ops.sharding.step import compare_ranks
from recstore_ops.table.shard import JoinNotifier, Shard, joinings
from recstore_ops.table.table import Table

_SECONDS = 1.0
"""How long a rank that fails waits for the others to hear of it."""

_KEPT_LOOKUPS = 64
"""The number of lookups whose requests a rank without batches remembers, for their gradients."""


class Op(IntEnum):
    """The next action of a rank."""

    JOINED = 0
    LOOKUP = 1
    FAILED_LOOKUP = 2
    GRADIENTS = 3
    STEP = 4
    FAILED = 5


_NAMES = {
    Op.LOOKUP: "a lookup",
    Op.FAILED_LOOKUP: "a lookup",
    Op.GRADIENTS: "a backward pass",
    Op.STEP: "a step",
}


class Part(NamedTuple):
    """The part of an announcement about one table.

    Attributes:
        place: its place among the tables of the operation, from 1 on; 0 if it is none of them.
        is_trained: whether it collects gradients.
        inserts: whether ids without a row get one.
        has_padding: whether it has a `padding_idx`.
        padding_idx: that, or 0.
        rate: the bits of its learning rate.
        clears: how often what it collected was dropped.
    """

    place: int = 0
    is_trained: int = 0
    inserts: int = 0
    has_padding: int = 0
    padding_idx: int = 0
    rate: int = 0
    clears: int = 0


class RankStatus(NamedTuple):
    """The announcement of a rank to the others.

    Attributes:
        op: the next action.
        number: of the lookup.
        parts: one for each table.
    """

    op: Op
    number: int
    parts: list[Part]

    def words(self) -> list[int]:
        return [self.op, self.number, *(word for part in self.parts for word in part)]

    @classmethod
    def of(cls, words: list[int]) -> RankStatus:
        size = len(Part._fields)
        return cls(Op(words[0]), words[1], [Part(*words[at : at + size]) for at in range(2, len(words), size)])

    def agrees(self, other: RankStatus) -> bool:
        """Whether both do the same with the same tables."""
        places, others = ([part.place for part in each.parts] for each in (self, other))
        return (self.op, self.number, places) == (other.op, other.number, others)


class Joining(JoinNotifier):
    """Announces the work of this rank with sharded tables while some ranks may have no more batches.

    Args:
        shard: of the tables.
        tables: those of the modules.
        group: the ranks once more.
    """

    def __init__(self, shard: Shard, tables: Sequence[Table], group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._shard = shard
        self._tables = list(tables)
        self._lookups = 0
        self._has_heard_of_failure = False

    def look_up(self, tables: Sequence[Table], paddings: Sequence[int | None], inserts: Sequence[bool]) -> int:
        """Announces a lookup, and returns its number."""
        self._lookups += 1
        parts = {
            self._place(table): Part(
                place, int(table.requires_grad), int(is_inserting), int(padding is not None), padding or 0
            )
            for place, (table, padding, is_inserting) in enumerate(zip(tables, paddings, inserts, strict=True), 1)
        }
        self._announce(Op.LOOKUP, self._lookups, parts)
        return self._lookups

    def fail_lookup(self) -> None:
        """Announces that this rank cannot do the lookup of the others."""
        self._lookups += 1
        with suppress(RuntimeError):  # This rank's own error goes before.
            self._announce(Op.FAILED_LOOKUP, self._lookups, {})

    def accept(self, lookup: Lookup, accept: Callable[[], None]) -> None:
        """Announces the gradients of a lookup, which `accept` exchanges."""
        self._announce(Op.GRADIENTS, lookup.number, {})
        with self.announced():
            accept()

    def step(self, tables: Sequence[Table]) -> None:
        """Announces a step, with the learning rates."""
        # A double travels by its bits, in the one int64 tensor that an announcement is.
        rates = [struct.unpack("q", struct.pack("d", table.learning_rate()[0]))[0] for table in tables]
        parts = zip(tables, rates, strict=True)
        self._announce(
            Op.STEP, 0, {self._place(table): Part(place, rate=rate) for place, (table, rate) in enumerate(parts, 1)}
        )

    def fail(self) -> None:
        """Announces that this rank leaves by an error, unless another has done so. The others may not receive it."""
        if self._has_heard_of_failure:
            return
        with suppress(RuntimeError):
            words = self._words(Op.FAILED, 0, {})
            # The wait may end before the exchange does: its buffers have to outlive this call.
            self._kept = [torch.empty_like(words) for _ in range(self._shard.world)], words
            work = dist.all_gather(*self._kept, group=self.group, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=_SECONDS))

    def _place(self, table: Table) -> int:
        for place, each in enumerate(self._tables):
            if each.collector is table.collector:
                return place
        raise ValueError(f'table "{table.name}" is of no module that sharding.join was given')

    def _words(self, op: Op, number: int, parts: dict[int, Part]) -> Tensor:
        # Counts of drops are in every announcement, so that ranks without batches drop the same gradients.
        said = [
            parts.get(place, Part())._replace(clears=table.times_cleared) for place, table in enumerate(self._tables)
        ]
        return torch.tensor(RankStatus(op, number, said).words(), dtype=torch.int64, device=self._shard.device)

    def tell(self, op: Op, number: int = 0, parts: dict[int, Part] | None = None) -> list[RankStatus]:
        """Announces the action of this rank, and returns the announcements of all ranks.

        Raises:
            RuntimeError: a rank left by an error.
        """
        words = self._words(op, number, parts or {})
        received = [torch.empty_like(words) for _ in range(self._shard.world)]
        dist.all_gather(received, words, group=self.group)
        said = [RankStatus.of(each.tolist()) for each in received]
        failed = [rank for rank, each in enumerate(said) if each.op == Op.FAILED]
        if failed:
            # A second announcement, by this rank's own error, would meet no counterpart: the others have left by then.
            self._has_heard_of_failure = True
            raise RuntimeError(
                f"{self._named(range(len(self._tables)))}: rank {failed[0]} left sharding.join by an error of its own, "
                "which tells why"
            )
        return said

    def _announce(self, op: Op, number: int, parts: dict[int, Part]) -> None:
        """Announces the action of this rank, and checks that all ranks with batches do the same."""
        said = self.tell(op, number, parts)
        own = said[self._shard.rank]
        failed = [rank for rank, each in enumerate(said) if each.op == Op.FAILED_LOOKUP and rank != self._shard.rank]
        if failed:
            raise of_other_rank(f"a lookup failed on rank {failed[0]}; its own error tells why")
        for rank, each in enumerate(said):
            if each.op != Op.JOINED and not each.agrees(own):
                raise RuntimeError(
                    f"rank {rank} is in {self._described(each)}, and rank {self._shard.rank} in "
                    f"{self._described(own)}: within sharding.join all ranks that have batches do the same"
                )

    def _described(self, said: RankStatus) -> str:
        places = [place for place, part in enumerate(said.parts) if part.place]
        return f"{_NAMES[said.op]} of {self._named(places)}" if places else _NAMES[said.op]

    def _named(self, places: Sequence[int]) -> str:
        return "tables " + ", ".join(f'"{self._tables[place].name}"' for place in places)

    def chosen(self, said: RankStatus) -> list[tuple[Table, Part]]:
        """The tables that another rank named, in its order."""
        named = [pair for pair in zip(self._tables, said.parts, strict=True) if pair[1].place]
        return sorted(named, key=lambda pair: pair[1].place)

    def cleared_since(self, said: RankStatus, before: list[int]) -> None:
        """Drops the gradients that this rank collected for a table, if the others have dropped theirs."""
        for place, (table, part) in enumerate(zip(self._tables, said.parts, strict=True)):
            if part.clears > before[place]:
                table.clear_collected()
                before[place] = part.clears

    def clears(self) -> list[int]:
        """How often each table's gradients were dropped here."""
        return [table.times_cleared for table in self._tables]


class _Shadow:
    """Does on a thread what the other ranks do, from when this one has no more batches until none has any."""

    def __init__(self, joining: Joining, shard: Shard) -> None:
        self._joining = joining
        self._shard = shard
        self._lookups: dict[int, Lookup] = {}
        self._error: Exception | None = None
        self._thread = Thread(target=self._serve, name="recstore-join", daemon=True)
        self.is_started = False

    def start(self) -> None:
        self.is_started = True
        self._thread.start()

    def end(self, timeout: float | None = None) -> None:
        """Waits until no rank has batches.

        Raises:
            Exception: what went wrong on this rank meanwhile, or a rank's end by an error.
        """
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            clears = self._joining.clears()
            while True:
                others = [said for said in self._joining.tell(Op.JOINED) if said.op != Op.JOINED]
                if not others:
                    return
                # Before the action is repeated: a step must not apply what the others have dropped.
                self._joining.cleared_since(others[0], clears)
                # A lookup that failed, or ranks at odds: they raise, and exchange nothing.
                if all(said.op != Op.FAILED_LOOKUP and said.agrees(others[0]) for said in others):
                    with self._joining.announced():
                        self._follow(others[0])
        except Exception as error:
            self._error = error

    def _follow(self, said: RankStatus) -> None:
        follow: dict[Op, Callable[[RankStatus], None]] = {
            Op.LOOKUP: self._look_up,
            Op.GRADIENTS: self._accept,
            Op.STEP: self._step,
        }
        try:
            follow[said.op](said)
        except RuntimeError as error:
            # Those of the other ranks come to them too.
            if not getattr(error, "is_of_other_rank", False):
                # The first error counts. The thread goes on, since the others wait for its part of each exchange.
                self._error = self._error or error

    def _look_up(self, said: RankStatus) -> None:
        chosen = self._joining.chosen(said)
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        lookup = Lookup(
            [table for table, _ in chosen],
            [none for _ in chosen],
            [part.padding_idx if part.has_padding else None for _, part in chosen],
            [bool(part.inserts) for _, part in chosen],
            self._shard,
        )
        lookup.trained = [bool(part.is_trained) for _, part in chosen]
        lookup.served = None
        self._lookups[said.number] = lookup
        # No announcement says that a lookup will get no more gradients, so the oldest leave.
        while len(self._lookups) > _KEPT_LOOKUPS:
            del self._lookups[next(iter(self._lookups))]

    def _accept(self, said: RankStatus) -> None:
        lookup = self._lookups[said.number]
        lookup.accept([torch.zeros_like(rows) for rows in lookup.rows])

    def _step(self, said: RankStatus) -> None:
        chosen = self._joining.chosen(said)
        # The ranks that go on may have scheduled their rate since this one ran out of batches.
        for table, part in chosen:
            _native.set_optimizer_learning_rate(table.table_id, struct.unpack("d", struct.pack("q", part.rate))[0])
        tables = [table for table, _ in chosen]
        compare_ranks(tables)
        operators.apply_grads([table.collector for table in tables])


_own_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The group that `join` made for each group of tables: once, not for each epoch."""


def second_shard(shard: Shard, group: dist.ProcessGroup | None) -> Shard:
    """The same ranks in a group of their own, so that two exchanges can be under way.

    Raises:
        ValueError: a group of other ranks, or no group although one has to be given.
    """
    if group is None and shard.is_alone:
        return shard
    return replace(shard, group=same_ranks(shard.group, group, dist.get_backend(shard.group)))


def same_ranks(group: dist.ProcessGroup, second_group: dist.ProcessGroup | None, backend: str) -> dist.ProcessGroup:
    """Returns a second group of the same ranks: the one that was given, or a new one.

    Raises:
        ValueError: a group of other ranks, or no group although one has to be given.
    """
    ranks = dist.get_process_group_ranks(group)
    if second_group is not None:
        if dist.get_process_group_ranks(second_group) != ranks or second_group is group:
            raise ValueError(f"second_group must be another group of the ranks {ranks}")
        return second_group
    if len(ranks) < dist.get_world_size():
        raise ValueError(f"the tables are sharded over the ranks {ranks} only: give second_group")
    made = dist.new_group(ranks, backend=backend)
    assert isinstance(made, dist.ProcessGroup), "this process is among the ranks"
    return made


def _own_group(shard: Shard, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks in a group of their own, so that the dense part's exchanges go beside those of tables."""
    if group is None and shard.group in _own_groups:
        return _own_groups[shard.group]
    own = second_shard(shard, group).group
    if group is None:
        _own_groups[shard.group] = own
    return own


def joining_of(shard: Shard) -> Joining | None:
    """The `join` under way over the group of a shard; `None` outside."""
    found = joinings.get(shard.group) if joinings else None
    return found if isinstance(found, Joining) else None


@contextmanager
def join(
    modules: Sequence[Any],
    joinables: Sequence[Joinable] = (),
    second_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Iterator[None]:
    """Within it the ranks of sharded tables may have different numbers of batches.

    A rank that leaves it takes part, with its rows, in the lookups, backward passes and steps of the others until all
    have left, and no rank waits for one that has no batches. Steps of a `SparseOptimizer` then change its rows as those
    of all others, by the learning rate of the ranks that go on.

    Takes the place of `DistributedDataParallel.join` and `torch.distributed.algorithms.Join`, which know nothing of
    tables.

    Args:
        modules: all modules whose tables are sharded over one group and looked up within.
        joinables: what else takes part, such as a `DistributedDataParallel` over the dense part.
        second_group: the ranks of the modules' group once more. By default one is made, if theirs has all ranks of the
            job; all of them then enter together.
        **options: of `torch.distributed.algorithms.Join`, for `joinables`.

    Raises:
        ValueError: no modules, one whose tables are not sharded over the one group, or a group of other ranks.
        RuntimeError: a rank left by an error, or did something else than the others; names it. Also for work that is
            not announced to ranks without batches, such as clipping, scaling, opening a table or a checkpoint.

    Examples:
        ``with join([bags], [top]):`` around the loop over batches. `top` is a `DistributedDataParallel`.
    """
    tables = [table for module in modules for table in module.tables()]
    if not tables or any(table.shard is None or table.shard.group is not tables[0].shard.group for table in tables):
        raise ValueError("join needs modules whose tables are sharded over one process_group")
    if options and not joinables:
        raise ValueError(f"the options {sorted(options)} of join are for joinables, and there are none")
    shard = shard_of_tables(tables)
    torch_join = Join(list(joinables), **options) if joinables else nullcontext()
    if shard.is_alone:
        with torch_join:
            yield
        return
    if shard.group in joinings:
        raise RuntimeError("a join over this process_group is under way")
    # A group of its own: the thread's exchanges would mix with those of the dense part, which the main thread makes.
    joining = Joining(shard, tables, _own_group(shard, second_group))
    joinings[shard.group] = joining
    shadow = _Shadow(joining, shard)
    try:
        with torch_join:
            yield
            # Inside `torch_join`, whose exit waits for the ranks with batches. They wait for this rank's rows
            # meanwhile.
            shadow.start()
        shadow.end()
    except BaseException:
        _leave_by_error(joining, shadow)
        raise
    finally:
        del joinings[shard.group]


def _leave_by_error(joining: Joining, shadow: _Shadow) -> None:
    # Once the thread runs, it alone speaks for this rank: two announcements at once would mix.
    if not shadow.is_started:
        joining.fail()
        return
    with suppress(Exception):
        shadow.end(_SECONDS)


__all__ = ["join"]
