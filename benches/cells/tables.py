"""The stages of `lookup` and `step`: each table is filled once and serves both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from benches.cells import lookup, step
from benches.cells.one_table import OneTable, open_table
from benches.cells.setting import LOOKUPS, STEPS, Setting, Table, tables_of
from benches.cells.stage import Stage
from benches.measured import Case
from benches.scale import Scale

_Work = tuple[Callable[[OneTable, Setting, Scale], Case], Setting]


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage a table."""
    return [_stage(scale, table, work) for table in tables_of(LOOKUPS) if (work := _work_in(table, chosen))]


def _work_in(table: Table, chosen: Collection[str]) -> list[_Work]:
    """What the chosen cells do in a table."""
    lookups = [(lookup.lookup_case, setting) for setting in LOOKUPS if lookup.CELL in chosen]
    steps = [(step.step_case, setting) for setting in STEPS if step.CELL in chosen]
    return [work for work in [*lookups, *steps] if work[1].table == table]


def _stage(scale: Scale, table: Table, work: list[_Work]) -> Stage:
    rows, dim, kind = table
    rounds = sum((scale.lookups if make is lookup.lookup_case else scale.steps).rounds for make, _ in work)
    cell = lookup.CELL if work[0][0] is lookup.lookup_case else step.CELL
    return Stage(cell, f"{rows:,} rows of {dim}, ids {kind}", rounds, partial(_cases, scale, table, work))


def _cases(scale: Scale, table: Table, work: list[_Work]) -> Iterator[Case]:
    rows, dim, kind = table
    with open_table(scale, rows, dim, kind=kind) as opened:
        for make, setting in work:
            yield make(opened, setting, scale)
