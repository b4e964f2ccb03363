"""Saves and loads beside plainly writing and reading as many bytes, and training while a save runs.

Plain writing is one file in pieces, synced and put in the place of the one before; plain reading is one file into
memory of its own, in huge pages as rows lie in. As for a load after a restart, the rows and what was read before are
gone by then. The fastest of some rounds counts: a virtual machine may take longer to get new memory than to fill it,
and the rounds in which it has to are the slow ones. A disk gets to rest before each timing. The files that are read lie
in the page cache: they were written just before.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benches import ids
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.competitors.recstore import ADAGRAD, RecStoreTable
from benches.measured import Figure
from benches.rounds import threads
from benches.scale import Scale
from recstore_ops import RecStoreClient, checkpoint

CELL = "checkpoint"

_ROWS, _DIM, _BATCH = 4_000_000, 64, 4_096
_ROUNDS = 8
_UNDISTURBED_SECONDS = 4.0
_PIECE = 4 << 20
_CHANGED_SHARE = 100
"""One row of so many is changed before a delta."""


class _Times(NamedTuple):
    """Seconds of one round."""

    save: float
    write: float
    load: float
    read: float


class _Disturbed(NamedTuple):
    """Training alone and during a save: seconds of each step, and those of the save."""

    alone: list[float]
    during: list[float]
    save: float

    @property
    def speed(self) -> float:
        return statistics.mean(self.alone) / statistics.mean(self.during)


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, f"checkpoints of {_ROWS:,} rows of {_DIM}", 1, lambda: _figures(scale))]


def _figures(scale: Scale) -> Iterator[Figure]:
    rows = scale.of(_ROWS)
    rounds = range(_ROUNDS if scale.is_full else 1)
    with bench_directory("checkpoint-") as directory:
        with RecStoreTable(rows, _DIM, ADAGRAD) as table:
            times = [_times(table, directory) for _ in rounds]
        fastest = _Times(*(min(seconds) for seconds in zip(*times, strict=True)))
        yield Figure(CELL, "save, speed over plain writing", fastest.write / fastest.save, "x", ">= 0.7")
        yield Figure(CELL, "load, speed over plain reading", fastest.read / fastest.load, "x", ">= 0.7")
        with RecStoreTable(rows, _DIM, ADAGRAD) as table:
            training = _Training(table, rows, scale)
            write = statistics.median(time.write for time in times)
            yield from _disturbance(training, rounds, directory, write)
            delta = statistics.median(_delta(table, rows, directory) for _ in rounds)
        yield Figure(CELL, "delta of 1 % of the rows over a full save", delta / fastest.save, "x", "<= 0.05")


def _times(table: RecStoreTable, directory: Path) -> _Times:
    """The seconds of one round; the table is made anew."""
    plain = directory / "plain"
    save = _seconds(partial(checkpoint.save, directory, progress=False))
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    write = _seconds(partial(_write, plain, stored))
    RecStoreClient().drop(table.module.name)
    load = _seconds(partial(checkpoint.load, directory, progress=False))
    with mmap.mmap(-1, stored) as memory:
        read = _seconds(partial(_read, plain, memory))
    return _Times(save, write, load, read)


def _disturbance(training: _Training, rounds: Collection[int], directory: Path, write: float) -> Iterator[Figure]:
    with threads(1):
        disturbed = [training.disturbed(directory) for _ in rounds]
    speed = statistics.median(each.speed for each in disturbed)
    yield Figure(CELL, "training on one core during a save, speed", speed, "x", ">= 0.6")
    alone, during = (
        [step for each in disturbed for step in each.alone],
        [step for each in disturbed for step in each.during],
    )
    added = 1e3 * (_percentile(during, 0.999) - _percentile(alone, 0.999))
    yield Figure(CELL, "99.9th percentile of a step, added by a save", added, "ms", "<= 50")
    save = statistics.median(each.save for each in disturbed)
    yield Figure(CELL, "save during training over plain writing", save / write, "x", "<= 3")
    all_cores = statistics.median(training.disturbed(directory).speed for _ in rounds)
    yield Figure(CELL, "training on all cores during a save, speed", all_cores, "x")


class _Training:
    """Steps of one table, one after another."""

    def __init__(self, table: RecStoreTable, rows: int, scale: Scale) -> None:
        self._table = table
        self._batches = ids.batches(rows, scale.of(_BATCH), "uniform")
        self._grad_ND = gradients(scale.of(_BATCH), _DIM)
        self._seconds = _UNDISTURBED_SECONDS if scale.is_full else 0.0

    def disturbed(self, directory: Path) -> _Disturbed:
        os.sync()
        end = time.perf_counter() + self._seconds
        alone = self._steps_while(lambda: time.perf_counter() < end)
        start = time.perf_counter()
        saving = checkpoint.save_async(directory)
        during = self._steps_while(lambda: not saving.done())
        saving.result()
        return _Disturbed(alone, during, time.perf_counter() - start)

    def _steps_while(self, goes_on: Callable[[], bool]) -> list[float]:
        seconds: list[float] = []
        while goes_on() or not seconds:
            batch = self._batches[len(seconds) % len(self._batches)]
            start = time.perf_counter()
            self._table.step(batch.ids, self._grad_ND)
            seconds.append(time.perf_counter() - start)
        return seconds


def _delta(table: RecStoreTable, rows: int, directory: Path) -> float:
    """The seconds of a delta after one row of a hundred has changed."""
    changed = ids.ids_of(torch.arange(0, rows, _CHANGED_SHARE))
    table.step(changed, gradients(len(changed), _DIM))
    return _seconds(lambda: checkpoint.save(directory, kind="delta", progress=False))


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _seconds(work: Callable[[], object]) -> float:
    """The seconds of `work`, which finds a disk that has nothing left to do."""
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write(path: Path, count: int) -> None:
    """Writes so many bytes to a file beside and syncs them, before it takes the place of `path`."""
    piece, beside = memoryview(os.urandom(_PIECE)), path.with_suffix(".new")
    with beside.open("wb", buffering=0) as file:
        for start in range(0, count, _PIECE):
            file.write(piece[: count - start])
        os.fsync(file.fileno())
    beside.replace(path)


def _read(path: Path, memory: mmap.mmap) -> None:
    memory.madvise(mmap.MADV_HUGEPAGE)
    with path.open("rb", buffering=0) as file, memoryview(memory) as rest:
        done = 0
        while done < len(rest):
            done += file.readinto(rest[done:])


@contextmanager
def bench_directory(prefix: str) -> Iterator[Path]:
    """An empty directory beside the figures: a disk, where memory might pass for one elsewhere."""
    parent = Path(__file__).resolve().parents[2] / "build" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)
