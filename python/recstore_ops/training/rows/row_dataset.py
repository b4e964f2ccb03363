"""Rows for PyTorch's DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.batching import regroup, shuffled
from recstore_ops.training.rows.row_source import RowSource


class RowDataset(IterableDataset[Batch]):
    """Batches of a source, for `DataLoader(dataset, batch_size=None, num_workers=n)`; each worker reads a shard.

    Args:
        source: must be picklable where workers are spawned instead of forked.
        batch_size: rows of a batch; the last one of each worker may have fewer.
        shuffle_window: rows are permuted within windows of that many rows, in each worker; None keeps their order.
        seed: of the permutations.

    At the end of a pass, bad rows that were skipped are warned of, file by file, in the worker that skipped them.
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
        """Makes the next pass shuffle otherwise than those with other numbers."""
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
