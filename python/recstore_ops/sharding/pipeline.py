"""`ShardedPipeline`: the exchange of the next batch while this one computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import torch.distributed as dist

from recstore_ops.sharding.join import joining_of, second_shard
from recstore_ops.sharding.lookup import Lookup, shard_of_tables
from recstore_ops.sharding.pending import PendingLookup, add_pending, drop_pending
from recstore_ops.sharding.rows import Request, key_of, make_lookup
from recstore_ops.sharding.statistics import timed
from recstore_ops.sparse.prefetch_iterator import find_features, prefetch
from recstore_ops.table.shard import Shard

# Whether it pays to exchange ahead: both ways are measured in turn, and all ranks choose the same one.
#
# A cycle begins with some batches exchanged ahead and as many that are not. The exchange of the next one, ahead again,
# carries what each rank measured. The faster way then takes the rest of the cycle; cycles become longer.

_TRIED = 6
"""The batches of a trial, of each way. Those beside the other way do not count."""

_TOLD, _DECIDED = 2 * _TRIED, 2 * _TRIED + 2
"""The batch of a cycle whose exchange carries the measurements, and the first one after all ranks have them."""

_FIRST_CYCLE, _LONGEST_CYCLE = 64, 2048

_GAIN = 0.98
"""The part of the time of the plain way that the other one must stay below."""

_BITS = 31
_MAX = (1 << _BITS) - 1


class ExchangeTuner:
    """Chooses for each batch, in order, whether it is exchanged ahead.

    Attributes:
        is_ahead: whether the rest of the cycle is; the same on all ranks, as all is that is chosen here.
    """

    def __init__(self) -> None:
        self.is_ahead = False
        self._place = -1
        self._cycle = _FIRST_CYCLE
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forgets batches that were begun and never given out."""
        self._begun: deque[bool] = deque()
        self._before: tuple[bool, float] | None = None

    @property
    def is_decided_now(self) -> bool:
        """Whether the batch that begins next is the first one after all ranks have all measurements."""
        return self._place + 1 == _DECIDED

    def begin(self) -> bool:
        """Whether the next batch is exchanged ahead."""
        self._place += 1
        if self._place == self._cycle:
            self._place, self._cycle = 0, min(2 * self._cycle, _LONGEST_CYCLE)
            self._times = {False: [], True: []}
        in_trial = self._place < _TRIED or self._place == _TOLD
        chosen = in_trial if self._place < _DECIDED else self.is_ahead
        self._begun.append(chosen)
        return chosen

    def finish(self) -> None:
        """Notes that the consumer is done with the next batch given out."""
        now, was_ahead = time.perf_counter(), self._begun.popleft()
        # A batch counts if its neighbours went the same way: an exchange ahead takes time from the batch before it.
        if self._before is not None and self._before[0] == was_ahead and list(self._begun)[:1] == [was_ahead]:
            self._times[was_ahead].append(now - self._before[1])
        self._before = was_ahead, now

    @property
    def note(self) -> int:
        """The measurements of this rank, for the others; 0 if there are none, or the others have them already."""
        if self._place != _TOLD or not all(self._times.values()):
            return 0
        # Microseconds of both ways in one int64; zero is free to mean that a rank has none.
        ahead, plain = (min(_MAX, 1 + int(1e6 * median(self._times[way]))) for way in (True, False))
        return ahead << _BITS | plain

    def decide(self, notes: Sequence[int]) -> None:
        """Chooses the way for the rest of the cycle by the measurements of all ranks; if one has none, it stays."""
        if all(notes):
            self.is_ahead = sum(note >> _BITS for note in notes) < _GAIN * sum(note & _MAX for note in notes)


class Sharded(Protocol):
    """A module whose tables are sharded."""

    def requests(self, features: Any) -> list[Request]:
        """The lookups of a `forward` of these features."""
        ...


class ShardedPipeline:
    """Goes through a DataLoader and exchanges ids and rows of the next batch while the batch before is worked on.

    It does so if that is faster: on the first batches, and from time to time again, it measures both ways, and all
    ranks go on in the one that is faster for them together. The choice stays for the next epoch.

    Results equal those of a loop without it: when a batch has come, the owners of its rows send those again that have
    changed. The exchange ahead runs on a thread and a process group of its own. All ranks go through one together, and
    each looks up every batch once. Ids have to lie on the CPU or be ready when the batch is. An error of the loader is
    raised in place of its batch.

    Args:
        loader: any iterable of batches; all ranks have as many.
        modules: collections or table modules of one process group. `forward` of each then finds its rows.
        features: takes what the modules' `forward` is given out of a batch, the same for all. By default what
            `PrefetchingDataLoader` takes.
        second_group: the ranks of the modules' group once more. By default one is made, if theirs has all ranks of the
            job; all of them then make the pipeline together.

    Raises:
        ValueError: no modules, one whose tables are not sharded, or a group of other ranks.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        modules: Sequence[Any],
        features: Callable[[Any], Any] | None = None,
        second_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.loader = loader
        self.modules = list(modules)
        self._features = features or find_features
        self._modules_shard = _common_shard(self.modules)
        self._shard = second_shard(self._modules_shard, second_group)
        self._pace = ExchangeTuner()
        self._told: PendingLookup | None = None

    def __len__(self) -> int:
        """The number of batches, if the DataLoader knows it."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self._shard.is_alone:
            yield from self.loader
            return
        if joining_of(self._modules_shard) is not None:
            raise RuntimeError(
                "a ShardedPipeline exchanges ahead, which sharding.join does not announce to other ranks"
            )
        begun: list[PendingLookup] = []
        self._pace.start_epoch()
        with ThreadPoolExecutor(1, "recstore-exchange") as thread:
            try:
                for batch, own in prefetch(self.loader, lambda batch: self._begin(thread, batch, begun), 1):
                    yield batch
                    self._pace.finish()
                    drop_pending(own)
                    del begun[: len(own)]
            finally:
                # Also if the loop is left early: other ranks wait for the exchanges that have begun.
                drop_pending(begun)

    def _begin(self, thread: ThreadPoolExecutor, batch: Any, begun: list[PendingLookup]) -> list[PendingLookup]:
        """Begins the lookups of a batch, each of which is then among `begun`, and returns them; none if it is not."""
        self._decide()
        if not self._pace.begin():
            return []
        features = self._features(batch)
        before = len(begun)
        for module in self.modules:
            # Copies: the batch may be filled anew before its forward compares its ids.
            requests = [replace(request, ids=request.ids.clone()) for request in module.requests(features)]
            future: Future[Lookup] = thread.submit(_look_up, requests, self._shard, self._pace.note)
            begun.append(PendingLookup(key_of(requests), future))
            add_pending(begun[-1])
        if self._pace.note:
            # The exchange of this lookup carries the measurements of this rank, and returns those of all.
            self._told = begun[-1]
        return begun[before:]

    def _decide(self) -> None:
        """Chooses the way to go on in, once the measurements of all ranks have come with a lookup."""
        if not self._pace.is_decided_now or self._told is None:
            return
        told, self._told = self._told, None
        if told.lookup.exception() is None:  # An error came to all ranks.
            self._pace.decide(told.lookup.result().exchange.notes)


def _look_up(requests: list[Request], shard: Shard, note: int) -> Lookup:
    with timed("hidden_seconds"):
        return make_lookup(requests, shard, note)


def _common_shard(modules: Sequence[Any]) -> Shard:
    tables = [table for module in modules for table in module.tables()]
    if not tables or any(table.shard is None for table in tables):
        raise ValueError("a ShardedPipeline needs modules with a process_group")
    shard = shard_of_tables(tables)
    if any(table.shard.group is not shard.group for table in tables):
        raise ValueError("the modules of a ShardedPipeline must have the same process_group")
    return shard
