"""Steps of SGD in a table of 50 million short rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from benches.cells.one_table import open_table
from benches.cells.setting import MILLION, Setting
from benches.cells.stage import Stage
from benches.cells.step import step_case
from benches.measured import Case
from benches.scale import Scale

CELL = "many_rows"
SETTINGS = [Setting(rows=50 * MILLION, dim=16, threads=threads) for threads in (1, 2)]


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, "50,000,000 rows of 16, SGD", len(SETTINGS) * scale.steps.rounds, lambda: _cases(scale))]


def _cases(scale: Scale) -> Iterator[Case]:
    with open_table(scale, SETTINGS[0].rows, SETTINGS[0].dim, "sgd") as table:
        for setting in SETTINGS:
            yield step_case(table, setting, scale, CELL)
