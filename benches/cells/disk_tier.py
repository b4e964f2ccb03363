"""Training of a table of four times its memory limit, beside plain reads and writes of as many records.

Nine of ten ids are of a tenth of the rows. What the store spends on rows that are not in memory is what it counts
itself: choosing who goes, writing those back, reading the others.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benches import ids, yardstick
from benches.cells.checkpoint import bench_directory
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.competitors.recstore import ADAGRAD, RecStoreTable
from benches.measured import Figure
from benches.scale import Scale

CELL = "disk_tier"

_ROWS, _DIM, _BATCH = 2_000_000, 64, 16_384
_WARM_BATCHES, _BATCHES = 60, 40
_HOT_SHARE, _HOT_ROWS = 0.9, 0.1
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
