"""Saves and loads beside plainly writing and reading as many bytes, and training while a save runs."""

from __future__ import annotations

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
from benches.scale import Scale
from recstore_ops import checkpoint

CELL = "checkpoint"

_ROWS, _DIM, _BATCH = 4_000_000, 64, 4_096
_ROUNDS = 3
_UNDISTURBED_SECONDS = 8.0
_PIECE = 4 << 20
_CHANGED_SHARE = 100
"""One row of so many is changed before a delta."""


class _Steps(NamedTuple):
    """Training for a while: steps a second, and the 99.9th percentile of a step's seconds."""

    a_second: float
    p999: float


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, f"checkpoints of {_ROWS:,} rows of {_DIM}", 1, lambda: _figures(scale))]


def _figures(scale: Scale) -> Iterator[Figure]:
    rows = scale.of(_ROWS)
    with RecStoreTable(rows, _DIM, ADAGRAD) as table, bench_directory("checkpoint-") as directory:
        saved, written, loaded, read = _sizes(directory)
        yield Figure(CELL, "save, speed over plain writing", written / saved, "x", ">= 0.7")
        yield Figure(CELL, "load, speed over plain reading", read / loaded, "x", ">= 0.7")
        yield from _disturbance(table, rows, scale, directory, written)
        yield Figure(
            CELL, "delta of 1 % of the rows over a full save", _delta(table, rows, directory) / saved, "x", "<= 0.05"
        )


def _sizes(directory: Path) -> tuple[float, float, float, float]:
    """The seconds of a save, of plain writing, of a load, and of plain reading: medians of rounds in turns."""
    seconds: list[tuple[float, float, float, float]] = []
    plain = directory / "plain"
    for _ in range(_ROUNDS):
        save = _seconds(partial(checkpoint.save, directory, progress=False))
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        write = _seconds(partial(_write, plain, stored))
        load = _seconds(partial(checkpoint.load, directory, progress=False))
        read = _seconds(partial(_read, plain))
        seconds.append((save, write, load, read))
    plain.unlink()
    save, write, load, read = (statistics.median(column) for column in zip(*seconds, strict=True))
    return save, write, load, read


def _disturbance(table: RecStoreTable, rows: int, scale: Scale, directory: Path, written: float) -> Iterator[Figure]:
    batches = ids.batches(rows, scale.of(_BATCH), "uniform")
    grad_ND = gradients(scale.of(_BATCH), _DIM)

    def train(goes_on: Callable[[], bool]) -> _Steps:
        seconds: list[float] = []
        while goes_on() or not seconds:
            batch = batches[len(seconds) % len(batches)]
            seconds.append(_seconds(partial(table.step, batch.ids, grad_ND)))
        return _Steps(len(seconds) / sum(seconds), _percentile(seconds, 0.999))

    end = time.perf_counter() + (_UNDISTURBED_SECONDS if scale.is_full else 0.0)
    undisturbed = train(lambda: time.perf_counter() < end)
    start = time.perf_counter()
    saving = checkpoint.save_async(directory)
    disturbed = train(lambda: not saving.done())
    saving.result()
    took = time.perf_counter() - start
    yield Figure(CELL, "training during a save, speed", disturbed.a_second / undisturbed.a_second, "x", ">= 0.6")
    added = 1e3 * (disturbed.p999 - undisturbed.p999)
    yield Figure(CELL, "99.9th percentile of a step, added by a save", added, "ms", "<= 50")
    yield Figure(CELL, "save during training over plain writing", took / written, "x", "<= 3")


def _delta(table: RecStoreTable, rows: int, directory: Path) -> float:
    """The seconds of a delta after one row of a hundred has changed."""
    changed = ids.ids_of(torch.arange(0, rows, _CHANGED_SHARE))
    table.step(changed, gradients(len(changed), _DIM))
    return _seconds(lambda: checkpoint.save(directory, kind="delta", progress=False))


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write(path: Path, count: int) -> None:
    """Writes so many bytes and syncs them."""
    piece = memoryview(os.urandom(_PIECE))
    with path.open("wb", buffering=0) as file:
        for start in range(0, count, _PIECE):
            file.write(piece[: count - start])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    piece = bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


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
