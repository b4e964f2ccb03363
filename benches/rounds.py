"""Times competitors in turns: A B C A B C ..., each from the same state of caches and output memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import torch

from benches.measured import Case, Competitor, Plan, Timed
from benches.output_state import put_into

_UNTIL_THREADS_PARK = 0.003
"""Seconds after which no team of OpenMP threads still spins for work."""


def measure(case: Case, on_round: Callable[[], None] = lambda: None) -> Timed:
    """Times a case; what a competitor raises ends it and is kept as its error."""
    timed = Timed(case.cell, case.axes, {name: [] for name in _names(case)}, _bases(case))
    with threads(case.threads), without_gc():
        try:
            for number in _round_numbers(case.plan):
                _time_round(case, number, timed)
                on_round()
        except Exception as error:
            timed.error = f"{type(error).__name__}: {error}"
    return timed


def _names(case: Case) -> list[str]:
    return [competitor.name for competitor in case.competitors] + list(case.absent)


def _bases(case: Case) -> dict[str, tuple[str, ...]]:
    return {competitor.name: competitor.bases for competitor in case.competitors if competitor.bases}


def _round_numbers(plan: Plan) -> Iterator[int]:
    """Gives -1 for a round that only warms up, then 0, 1, ..."""
    yield -1
    start = time.monotonic()
    for number in range(plan.rounds):
        if number >= plan.fewest_rounds and time.monotonic() - start > plan.seconds:
            return
        yield number


def _time_round(case: Case, number: int, timed: Timed) -> None:
    """Times each competitor once; a round that somebody did not finish does not count."""
    nanoseconds = {competitor.name: _time_one(case, competitor, number) for competitor in case.competitors}
    if number >= 0:
        for name, value in nanoseconds.items():
            timed.nanoseconds[name].append(value)


def _time_one(case: Case, competitor: Competitor, number: int) -> float:
    first = (number + 1) * case.calls
    call, result = competitor.call, None
    _prepare(case, competitor)
    start = time.perf_counter_ns()
    for batch in range(first, first + case.calls):
        result = call(batch)
    end = time.perf_counter_ns()
    del result
    return (end - start) / (case.calls * case.operations)


def _prepare(case: Case, competitor: Competitor) -> None:
    for tensor in case.read_first:
        tensor.sum()
    if competitor.output is not None:
        put_into(case.output, *competitor.output)
    time.sleep(_UNTIL_THREADS_PARK)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Gives torch that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Keeps the garbage collector from running."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
