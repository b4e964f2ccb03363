"""Rows of the next batches, read while this one is computed.

`PendingPrefetches` keeps what a collection issued until a forward with the same batch consumes it;
`PrefetchingDataLoader` issues them some batches ahead.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from recstore_ops.sparse.prefetch_iterator import check_prefetch_count, find_features, prefetch

MAX_ISSUED = 1024
"""A collection forgets what it issued beyond this number, oldest first, as the store does."""


@dataclass(frozen=True)
class Issued:
    """A prefetch that was not consumed yet.

    Attributes:
        handle: of the store's prefetch.
        names: the features, in the order of the batch.
        ids: their ids, one feature after another, `[N]`.
        issued_at: `time.time()` at the issue, in seconds.
    """

    handle: int
    names: tuple[str, ...]
    ids: Tensor
    issued_at: float

    def is_for(self, names: tuple[str, ...], ids: Tensor) -> bool:
        """Whether the rows belong to this batch."""
        return self.names == names and torch.equal(self.ids, ids)


@dataclass
class PrefetchStatistics:
    """Counts and times of prefetches.

    Attributes:
        issued: prefetches issued.
        used: forwards that found their rows prefetched.
        unused: forwards that read their rows while others were pending.
        ids: ids of the prefetches that were used.
        ahead_ms: milliseconds from issue to use, summed.
        wait_ms: milliseconds that forwards waited for rows, summed.
    """

    issued: int = 0
    used: int = 0
    unused: int = 0
    ids: int = 0
    ahead_ms: float = 0.0
    wait_ms: float = 0.0


class PendingPrefetches:
    """The prefetches that were issued, those that the next forwards may consume, and statistics.

    Attributes:
        pending: the handles that the next forwards may consume, oldest first.
        statistics: counts of what was issued and used.
    """

    def __init__(self) -> None:
        self._issued: OrderedDict[int, Issued] = OrderedDict()
        self.pending: deque[int] = deque()
        self._recorded: set[int] = set()
        self.statistics = PrefetchStatistics()

    def add(self, issued: Issued) -> None:
        """Remembers a prefetch; the oldest is forgotten beyond a bound."""
        while len(self._issued) >= MAX_ISSUED:
            self._forget(next(iter(self._issued)))
        self._issued[issued.handle] = issued
        self.statistics.issued += 1

    def of(self, handle: int) -> Issued:
        """Returns what was issued under a handle.

        Raises:
            ValueError: it was not issued by this collection, or was consumed.
        """
        if handle not in self._issued:
            raise ValueError(f"prefetch handle {handle} was not issued by this collection, or was consumed")
        return self._issued[handle]

    def make_pending(self, handle: int, counts: bool) -> None:
        """Lets the next forwards consume a prefetch; `counts` says whether statistics count it."""
        self.of(handle)
        if handle not in self.pending:
            self.pending.append(handle)
        if counts:
            self._recorded.add(handle)

    def take(self, names: tuple[str, ...], ids: Tensor, wait: Callable[[int], list[Tensor]]) -> list[Tensor] | None:
        """Consumes the prefetch of this batch; `None` if there is none, or the store has dropped it."""
        # By their ids and not by their order: a forward may get another batch than the next one that was issued.
        for handle in self.pending:
            issued = self._issued[handle]
            if issued.is_for(names, ids):
                return self._consume(issued, wait)
        self.statistics.unused += len(self.pending) > 0
        return None

    def _consume(self, issued: Issued, wait: Callable[[int], list[Tensor]]) -> list[Tensor] | None:
        # Forgotten before the wait, which consumes the handle even if it fails.
        started, counts = time.time(), issued.handle in self._recorded
        self._forget(issued.handle)
        try:
            rows = wait(issued.handle)
        except RuntimeError:
            return None  # The store drops what waits too long; the rows are read instead.
        if counts:
            self.statistics.used += 1
            self.statistics.ids += issued.ids.numel()
            self.statistics.ahead_ms += 1e3 * (started - issued.issued_at)
            self.statistics.wait_ms += 1e3 * (time.time() - started)
        return rows

    def _forget(self, handle: int) -> None:
        del self._issued[handle]
        self._recorded.discard(handle)
        if handle in self.pending:
            self.pending.remove(handle)

    def report(self, reset: bool) -> dict[str, float]:
        """Returns the statistics, and starts them anew with `reset`."""
        report = asdict(self.statistics)
        if reset:
            self.statistics = PrefetchStatistics()
        return report


class Prefetching(Protocol):
    """A collection that `PrefetchingDataLoader` can read ahead for."""

    def issue_fused_prefetch(self, features: Any, record_handle: bool = True) -> Any:
        """Issues a read of the rows of a batch."""
        ...


class PrefetchingDataLoader:
    """Goes through a DataLoader and issues the rows of the batches to come.

    An error of the DataLoader, or of a batch whose rows cannot be issued, is raised in place of that batch.

    Args:
        dataloader: any iterable of batches.
        module: the collection whose rows are read ahead.
        prefetch_count: how many batches it looks ahead, at least 1.
        features: takes the `KeyedJaggedTensor` out of a batch. By default the batch itself, its attribute
            `sparse_features`, or the one such value among the values of a tuple, list or dict.

    Raises:
        TypeError: a module that reads nothing ahead, or a `prefetch_count` that is no int.
        ValueError: a `prefetch_count` below 1.

    Examples:
        >>> from recstore_ops import RecStoreEmbeddingBagCollection
        >>> bags = RecStoreEmbeddingBagCollection(
        ...     [{"name": "item", "num_embeddings": None, "embedding_dim": 4, "feature_names": ["seen"]}]
        ... )
        >>> batches = [KeyedJaggedTensor(["seen"], torch.tensor([i, 7]), lengths=torch.tensor([2])) for i in range(5)]
        >>> [tuple(bags(batch).shape) for batch in PrefetchingDataLoader(batches, bags)]
        [(1, 1, 4), (1, 1, 4), (1, 1, 4), (1, 1, 4), (1, 1, 4)]
        >>> bags.report_prefetch_stats()["used"]
        5
    """

    __module__ = "recstore_ops"

    def __init__(
        self,
        dataloader: Iterable[Any],
        module: Prefetching,
        prefetch_count: int = 2,
        features: Callable[[Any], Any] | None = None,
    ) -> None:
        check_prefetch_count(prefetch_count)
        if not hasattr(module, "issue_fused_prefetch"):
            raise TypeError(
                "PrefetchingDataLoader needs a RecStoreEmbeddingBagCollection, whose bags may have one id each, "
                f"got {type(module).__name__}"
            )
        self.dataloader = dataloader
        self.module = module
        self.prefetch_count = prefetch_count
        self._features = features or find_features

    def __len__(self) -> int:
        """The number of batches, if the DataLoader knows it."""
        return len(self.dataloader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _ in prefetch(self.dataloader, self._issue, self.prefetch_count))

    def _issue(self, batch: Any) -> None:
        self.module.issue_fused_prefetch(self._features(batch))
