"""Training of a table of four times its memory limit, beside plain reads and writes of as many records.

Nine of ten ids are of a tenth of the rows. What the store spends on rows that are not in memory is what it counts
itself: choosing who goes, writing those back, reading the others. A second comparison trains a model, a bag of each
example under a perceptron, with its rows read ahead and without, and in memory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benches import ids, yardstick
from benches.cells.checkpoint import bench_directory
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.competitors.recstore import ADAGRAD, RecStoreTable, fill, new_name
from benches.measured import Figure
from benches.scale import Scale
from recstore_ops import (
    KeyedJaggedTensor,
    PrefetchingDataLoader,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
)

CELL = "disk_tier"

_ROWS, _DIM, _BATCH = 2_000_000, 64, 16_384
_WARM_BATCHES, _BATCHES = 60, 40
_HOT_SHARE, _HOT_ROWS = 0.9, 0.1
_HIDDEN, _ROUNDS = 256, 5
"""Of the perceptron; and rounds of its loops, each of a part of the batches."""
_RECORD_BYTES = 2 * _DIM * 4


class _Moved(NamedTuple):
    """What a table has moved between memory and disk so far: rows read and written, and the seconds of both."""

    read: int
    written: int
    seconds: float


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, f"{_ROWS:,} rows of {_DIM}, a quarter in memory", 1, lambda: _figures(scale))]


def _figures(scale: Scale) -> Iterator[Figure]:
    rows = scale.of(_ROWS)
    batches = list(_hot_and_cold(rows, scale.of(_BATCH)))
    with bench_directory("disk-tier-") as directory, tempfile.TemporaryFile(dir=directory) as plain:
        index = torch.arange(rows)
        yardstick.transfer(plain.fileno(), _RECORD_BYTES, index, writes=True)
        with RecStoreTable(rows, _DIM, ADAGRAD, memory_limit=_limit(rows), disk=directory) as table:
            yield from _compared(table, batches, rows, plain.fileno())
            seconds = _train(table, batches[_WARM_BATCHES:])
    with RecStoreTable(rows, _DIM, ADAGRAD) as table:
        _train(table, batches[:_WARM_BATCHES])
        in_memory = _train(table, batches[_WARM_BATCHES:])
    yield Figure(CELL, "training, speed over that of a table in memory", in_memory / seconds, "x")
    with bench_directory("disk-tier-") as directory:
        yield from _under_a_perceptron(rows, batches, directory)


def _under_a_perceptron(rows: int, batches: list[Tensor], directory: Path) -> Iterator[Figure]:
    """Speeds over that of a model whose rows are in memory and not read ahead; loops take turns."""
    where = {"memory_limit": _limit(rows), "disk": directory}
    models = [_Model(rows, **where), _Model(rows, **where), _Model(rows), _Model(rows)]
    ahead = [True, False, True, False]
    for model, is_ahead in zip(models, ahead, strict=True):
        model.train(batches[:_WARM_BATCHES], is_ahead)
    rounds = []
    for number in range(_ROUNDS):
        part = batches[_WARM_BATCHES:][number::_ROUNDS]
        rounds.append([model.train(part, is_ahead) for model, is_ahead in zip(models, ahead, strict=True)])
    disk_ahead, disk, memory_ahead, memory = (_median(list(seconds)) for seconds in zip(*rounds, strict=True))
    for model in models:
        model.drop()
    yield Figure(CELL, "under a perceptron, rows read ahead, speed over a table in memory", memory / disk_ahead, "x")
    yield Figure(CELL, "under a perceptron, speed over a table in memory", memory / disk, "x")
    yield Figure(CELL, "under a perceptron, in memory and read ahead, speed", memory / memory_ahead, "x")


class _Model:
    """A bag of one id for each example under a perceptron of one hidden layer, with the optimizer of its rows.

    Args:
        rows: of its table.
        where: where they lie.
    """

    def __init__(self, rows: int, **where: object) -> None:
        self._name = new_name()
        table = {"name": self._name, "num_embeddings": None, "embedding_dim": _DIM, "feature_names": ["seen"], **where}
        self._bags = RecStoreEmbeddingBagCollection([table], optimizer=ADAGRAD)
        self._head = nn.Sequential(nn.Linear(_DIM, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))
        self._optimizer = SparseOptimizer(modules=[self._bags])
        fill(self._bags.embedding_bags[self._name].table.handle, _DIM, ids.all_ids(rows, 262_144))

    def train(self, batches: list[Tensor], is_ahead: bool) -> float:
        """Takes a step of each batch and returns the seconds."""
        features = [KeyedJaggedTensor(["seen"], batch, lengths=torch.ones_like(batch)) for batch in batches]
        start = time.perf_counter()
        for batch in PrefetchingDataLoader(features, self._bags, 1) if is_ahead else features:
            self._head(self._bags(batch).view(-1, _DIM)).square().mean().backward()
            self._optimizer.step()
        return time.perf_counter() - start

    def drop(self) -> None:
        """Drops the table."""
        RecStoreClient().drop(self._name)


def _limit(rows: int) -> int:
    """A quarter of what the records take, and what the index takes besides."""
    return rows * _RECORD_BYTES // 4 + rows * 40 + (1 << 20)


def _compared(table: RecStoreTable, batches: list[Tensor], rows: int, plain: int) -> Iterator[Figure]:
    _train(table, batches[:_WARM_BATCHES])
    ratios, missed, disk = [], 0, []
    for batch in batches[_WARM_BATCHES:]:
        before = _moved(table)
        _train(table, [batch])
        now = _moved(table)
        read, written = now.read - before.read, now.written - before.written
        missed += read
        if read + written > 0:
            seconds = _plain_seconds(plain, rows, read, written)
            ratios.append((now.seconds - before.seconds) / seconds)
            disk.append(1e6 * (now.seconds - before.seconds) / (read + written))
    yield Figure(CELL, "time spent on missing rows over plain reads and writes", _median(ratios), "x", "<= 1.5")
    yield Figure(CELL, "time of a row read or written", _median(disk), "us")
    share = missed / sum(batch.unique().numel() for batch in batches[_WARM_BATCHES:])
    yield Figure(CELL, "distinct ids of a batch that are not in memory", 100 * share, "%")


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _train(table: RecStoreTable, batches: list[Tensor]) -> float:
    """Takes a step of each batch and returns the seconds."""
    grad_ND = gradients(batches[0].numel(), _DIM)
    start = time.perf_counter()
    for batch in batches:
        table.step(batch, grad_ND)
    return time.perf_counter() - start


def _moved(table: RecStoreTable) -> _Moved:
    found = table.module.table.statistics()
    return _Moved(found["rows_fetched"], found["rows_spilled"], found["disk_nanoseconds"] * 1e-9)


def _plain_seconds(plain: int, rows: int, read: int, written: int) -> float:
    """The seconds of plain calls for other rows of a file of as many records, in the order of the file."""
    generator = np.random.default_rng(read * 31 + written)
    draw = partial(generator.choice, rows, replace=False, shuffle=False)
    writes, reads = (torch.from_numpy(np.sort(draw(size=min(count, rows)))) for count in (written, read))
    start = time.perf_counter()
    yardstick.transfer(plain, _RECORD_BYTES, writes, writes=True)
    yardstick.transfer(plain, _RECORD_BYTES, reads, writes=False)
    return time.perf_counter() - start


def _hot_and_cold(rows: int, size: int) -> Iterator[Tensor]:
    """Ids of batches, nine of ten of a tenth of the rows."""
    generator = np.random.default_rng(0)
    hot_rows = max(1, int(rows * _HOT_ROWS))
    for _ in range(_WARM_BATCHES + _BATCHES):
        is_hot = generator.random(size) < _HOT_SHARE
        index = np.where(is_hot, generator.integers(hot_rows, size=size), generator.integers(rows, size=size))
        # Hot rows do not lie side by side.
        yield ids.ids_of(torch.from_numpy(index * 7_919 % rows))
