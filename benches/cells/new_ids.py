"""Steps of ids without rows, while the table grows from nothing to 10 million rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch

from benches import ids
from benches.cells.setting import BATCH, MILLION
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.competitors.recstore import RecStoreTable
from benches.ids import KINDS, IdKind
from benches.measured import Figure
from benches.rounds import threads, without_gc
from benches.scale import Scale
from benches.spread import percentile

CELL = "new_ids"

_ROWS, _DIM, _TABLES = 10 * MILLION, 64, 3


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage a kind of ids."""
    if CELL not in chosen:
        return []
    title = f"{_TABLES} tables of {_DIM} that grow to {_ROWS:,} rows"
    return [Stage(CELL, f"{title}, ids {kind}", 1, partial(_figures, scale, kind)) for kind in KINDS]


def _figures(scale: Scale, kind: IdKind) -> Iterator[Figure]:
    rows, batch = scale.of(_ROWS), scale.of(BATCH)
    with threads(2), without_gc():
        grown = [_grow(rows, batch, kind) for _ in range(_TABLES)]
    new = [value for taken, _ in grown for value in taken]
    ratios = [one / other for taken, others in grown for one, other in zip(taken, others, strict=True)]
    best = min(percentile(taken, 99) / statistics.median(taken) for taken, _ in grown)
    yield Figure(CELL, f"step of new ids over one of known ids, {kind}", statistics.median(ratios), "x", "<= 2.5")
    yield Figure(CELL, f"99th percentile of steps of new ids over their median, {kind}", best, "x", "<= 2")
    yield Figure(CELL, f"step of new ids, median, {kind}", statistics.median(new) / 1e6, "ms")


def _grow(rows: int, batch: int, kind: IdKind) -> tuple[list[float], list[float]]:
    """Nanoseconds of each step of new ids, and of a step of as many known ids right after it."""
    new, known = [], []
    grad_ND = gradients(batch, _DIM)
    generator = torch.Generator().manual_seed(0)
    with RecStoreTable(0, _DIM) as table:
        for number, fresh_N in enumerate(ids.all_ids(rows // batch * batch, batch, kind)):
            known_N = ids.ids_of(torch.randint((number + 1) * batch, (batch,), generator=generator), kind)
            grad_ND.sum()  # They come from the backward pass just before.
            new.append(_nanoseconds(lambda ids_N=fresh_N: table.step(ids_N, grad_ND)))
            known.append(_nanoseconds(lambda ids_N=known_N: table.step(ids_N, grad_ND)))
    return new, known


def _nanoseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start
