"""Lookups and steps of sizes and skews between those of the other cells: is any of them slower than its neighbours?

Only the yardstick and this package run. The neighbours themselves run again here, close in time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from benches import ids
from benches.cells.one_table import OURS, YARDSTICK
from benches.cells.setting import Setting, Table, of_each_kind, tables_of
from benches.cells.stage import Stage
from benches.cells.step import gradients, limit_of
from benches.competitors.recstore import RecStoreTable
from benches.ids import Distribution, turn_of
from benches.measured import Axis, Case, Competitor
from benches.scale import Scale
from benches.yardstick import Yardstick

CELL = "neighbours"
LOOKUP, STEP = "lookup", "step"

DIMS = {8: True, 12: False, 16: True, 24: False, 48: False, 64: True, 100: False, 128: True}
BATCHES = {1: True, 100: False, 256: True, 1_000: False, 4_096: True, 10_000: False, 65_536: True}
SKEWS: dict[Distribution, bool] = {"uniform": True, "zipf 0.8": False, "zipf": True, "zipf 1.2": False}
AXES: dict[str, Mapping[Axis, bool]] = {"dim": {**DIMS}, "ids a batch": {**BATCHES}, "drawn": {**SKEWS}}
"""The values of each axis in ascending order, and whether the cells `lookup` and `step` have them: the neighbours."""

SETTINGS = of_each_kind(
    dict.fromkeys(
        [
            *(replace(Setting(), dim=dim) for dim in DIMS),
            *(replace(Setting(), batch=batch) for batch in BATCHES),
            *(replace(Setting(), drawn=skew) for skew in SKEWS),
        ]
    )
)


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage a dim and kind of ids."""
    if CELL not in chosen:
        return []
    return [_stage(scale, table) for table in tables_of(SETTINGS)]


def _stage(scale: Scale, table: Table) -> Stage:
    rows, dim, kind = table
    settings = [setting for setting in SETTINGS if setting.table == table]
    rounds = len(settings) * (scale.lookups.rounds + scale.steps.rounds)
    return Stage(CELL, f"{rows:,} rows of {dim}, ids {kind}, between others", rounds, partial(_cases, scale, settings))


def _cases(scale: Scale, settings: list[Setting]) -> Iterator[Case]:
    rows, dim = scale.of(settings[0].rows), settings[0].dim
    with RecStoreTable(rows, dim, kind=settings[0].ids) as ours:
        yardstick = Yardstick(rows, dim)
        for setting in settings:
            yield _lookup(yardstick, ours, setting, scale)
            yield _step(yardstick, ours, setting, scale)


def _lookup(yardstick: Yardstick, ours: RecStoreTable, setting: Setting, scale: Scale) -> Case:
    batches = ids.batches(len(yardstick.records), scale.of(setting.batch), setting.drawn, kind=setting.ids)
    batch = turn_of(batches)
    output = ((len(batches[0].index), yardstick.dim), yardstick.dtype)
    competitors = [
        Competitor(YARDSTICK, lambda turn: yardstick.lookup(batch(turn).index), output=output),
        Competitor(OURS, lambda turn: ours.lookup(batch(turn).ids), YARDSTICK, output),
    ]
    axes: dict[str, Axis] = {"work": LOOKUP, **setting.axes()}
    return Case(CELL, axes, competitors, scale.lookups, setting.output, setting.threads, setting.calls)


def _step(yardstick: Yardstick, ours: RecStoreTable, setting: Setting, scale: Scale) -> Case:
    batches = ids.batches(len(yardstick.records), scale.of(setting.batch), setting.drawn, kind=setting.ids)
    batch, grad_ND = turn_of(batches), gradients(len(batches[0].index), yardstick.dim)
    output = (tuple(grad_ND.shape), yardstick.dtype)
    competitors = [
        Competitor(YARDSTICK, limit_of(yardstick, batches, grad_ND, setting.drawn), output=output),
        Competitor(OURS, lambda turn: ours.step(batch(turn).ids, grad_ND), YARDSTICK, output),
    ]
    axes: dict[str, Axis] = {"work": STEP, **setting.axes()}
    return Case(
        CELL, axes, competitors, scale.steps, setting.output, setting.threads, setting.calls, read_first=[grad_ND]
    )
