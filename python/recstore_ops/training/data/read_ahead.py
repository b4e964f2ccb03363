"""Reading ahead in a thread of its own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Iterable, Iterator
from queue import Empty, Queue
from threading import Event, Thread
from typing import Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from recstore_ops.training.data.batch import Batch, regroup, shuffled
from recstore_ops.training.data.row_source import RowSource

T = TypeVar("T")


def read_ahead(items: Iterable[T], depth: int = 4) -> Generator[T, None, None]:
    """Yields the items in order while a thread reads up to `depth` more.

    An exception of `items` is raised in place of the item that failed. The thread starts when the first item is asked
    for. It ends after the last one, or when the generator is closed or dropped, which waits for the item being read.

    Raises:
        ValueError: `depth` is below one.
    """
    if depth < 1:
        raise ValueError(f"expected a depth of at least 1, got {depth}")
    return _read_ahead(items, depth)


def _read_ahead(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    reader = _Reader(items, depth)
    try:
        yield from reader
    finally:
        reader.stop()


class _End:
    """Comes after the last item, or in place of one that failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Reader(Generic[T]):
    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._items = items
        self._fetched: Queue[T | _End] = Queue(depth)
        self._stopped = Event()
        self._thread = Thread(target=self._fetch, name="recstore-read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while not isinstance(item := self._fetched.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    def stop(self) -> None:
        self._stopped.set()
        self._make_room()
        # At the interpreter's exit the thread does not run any more, and never ends.
        if not sys.is_finalizing():
            self._thread.join()

    def _make_room(self) -> None:
        # The thread puts at most one item after it was stopped.
        try:
            while True:
                self._fetched.get_nowait()
        except Empty:
            pass

    def _fetch(self) -> None:
        end = _End(None)
        iterator = iter(())
        try:
            iterator = iter(self._items)
            for item in iterator:
                self._fetched.put(item)
                if self._stopped.is_set():
                    break
        except BaseException as error:
            end = _End(error)
        finally:
            # A generator that is left before its end closes its files now, in the thread that opened them.
            if isinstance(iterator, Generator):
                iterator.close()
            if not self._stopped.is_set():
                self._fetched.put(end)


class RowDataset(IterableDataset[Batch]):
    """Batches of a source, for `DataLoader(dataset, batch_size=None, num_workers=n)`; each worker reads a shard.

    Args:
        source: must be picklable if workers are spawned instead of forked.
        batch_size: rows of a batch; the last one of each worker may have fewer.
        shuffle_window: rows are permuted within windows of that many rows, in each worker; None keeps their order.
        seed: of the permutations.

    At the end of a pass, each worker warns of the bad rows that it skipped, file by file.
    """

    def __init__(self, source: RowSource, batch_size: int, shuffle_window: int | None = None, seed: int = 0) -> None:
        for name, value in (("batch_size", batch_size), ("shuffle_window", shuffle_window)):
            if value is not None and value < 1:
                raise ValueError(f"expected {name} to be at least 1, got {value}")
        self._source = source
        self._batch_size = batch_size
        self._shuffle_window = shuffle_window
        self._seed = seed
        # Shared memory, for workers that persist over epochs have a copy of everything else.
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next pass; passes with different numbers are shuffled differently."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        index, source = 0, self._source
        if worker is not None:
            index, source = worker.id, source.shard(worker.id, worker.num_workers)
        yield from regroup(self._shuffled(source, index), self._batch_size)
        for file in source.skipped:
            warnings.warn(f"skipped {file.count} bad rows of {file.path}, the first: {file.first}", stacklevel=2)

    def _shuffled(self, source: RowSource, worker: int) -> Iterator[Batch]:
        if self._shuffle_window is None:
            return iter(source)
        rng = np.random.default_rng([self._seed, int(self._epoch), worker])
        return shuffled(source, self._shuffle_window, self._batch_size, rng)
