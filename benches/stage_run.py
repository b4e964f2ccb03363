"""Runs a stage: opens its tables, measures its cases; what fails is told in its row and ends nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benches.cells.stage import Stage
from benches.measured import Case, Figure, Outcome, Timed
from benches.rounds import measure


def run(stage: Stage, on_round: Callable[[], None] = lambda: None) -> Iterator[Outcome]:
    """Gives what comes out of each case, and an error where the tables could not be opened or filled."""
    try:
        for item in stage.open():
            yield _outcome(item, on_round)
    except Exception as error:
        yield Timed(stage.cell, {"stage": stage.title}, error=f"{type(error).__name__}: {error}")


def _outcome(item: Case | Figure, on_round: Callable[[], None]) -> Outcome:
    return item if isinstance(item, Figure) else measure(item, on_round)
