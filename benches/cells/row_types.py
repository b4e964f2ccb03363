"""Lookups and steps in tables of rows of 16 and 8 bits beside float32."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from benches import ids
from benches.cells.setting import MILLION, Setting
from benches.cells.stage import Stage
from benches.cells.step import gradients, limit_of
from benches.competitors.recstore import RecStoreTable
from benches.ids import Batch
from benches.measured import Axis, Case, Competitor
from benches.scale import Scale
from benches.yardstick import Yardstick

CELL = "row_types"
FLOAT32, BFLOAT16, FLOAT16, INT8, E4M3 = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"
TYPES = {name: getattr(torch, name) for name in (FLOAT32, BFLOAT16, FLOAT16, INT8, E4M3)}
CODED = (INT8, E4M3)
LIMITS = {FLOAT32: "yardstick, float32", BFLOAT16: "yardstick, bfloat16"}
"""The yardsticks, of the types that have one."""

_ROWS = {MILLION: TYPES, 8 * MILLION: {name: dtype for name, dtype in TYPES.items() if name not in CODED}}
"""Rows, and the types that have so many: all of eight million would not fit 24 GiB of memory."""


@dataclass(frozen=True)
class _Tables:
    """Equally many rows in a table of each type, and the batches that they are read with."""

    yardsticks: dict[str, Yardstick]
    ours: dict[str, RecStoreTable]
    batches: list[Batch]

    @property
    def batch_size(self) -> int:
        return len(self.batches[0].ids)


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage a number of rows."""
    if CELL not in chosen:
        return []
    rounds = scale.lookups.rounds + scale.steps.rounds
    return [
        Stage(CELL, f"{rows:,} rows of each type", rounds, partial(_cases, scale, Setting(rows=rows))) for rows in _ROWS
    ]


def _cases(scale: Scale, setting: Setting) -> Iterator[Case]:
    rows, dim = scale.of(setting.rows), setting.dim
    with ExitStack() as opened:
        types = _ROWS[setting.rows]
        ours = {name: opened.enter_context(RecStoreTable(rows, dim, dtype=dtype)) for name, dtype in types.items()}
        batches = ids.batches(rows, scale.of(setting.batch), setting.drawn)
        limits = {name: Yardstick(rows, dim, dtype=TYPES[name]) for name in LIMITS}
        tables = _Tables(limits, ours, batches)
        yield Case(CELL, _axes("lookup", setting), list(_lookups(tables)), scale.lookups)
        yield _step_case(tables, setting, scale)


def _axes(work: str, setting: Setting) -> dict[str, Axis]:
    return {"work": work, **setting.axes()}


def _lookups(tables: _Tables) -> Iterator[Competitor]:
    for name, table in tables.ours.items():
        output = ((tables.batch_size, table.dim), table.output_type)
        if name in LIMITS:
            limit = partial(_limit_of_lookup, tables.yardsticks[name], tables.batches)
            yield Competitor(LIMITS[name], limit, _base_of_limit(name), output)
        yield Competitor(name, partial(_lookup, table, tables.batches), _bases(name), output)


def _step_case(tables: _Tables, setting: Setting, scale: Scale) -> Case:
    grad_ND = gradients(tables.batch_size, setting.dim)
    types = {table.output_type for table in tables.ours.values()}
    grads = {dtype: grad_ND.to(dtype) for dtype in types | {torch.float32}}
    competitors = list(_steps(tables, grads))
    return Case(CELL, _axes("step", setting), competitors, scale.steps, read_first=list(grads.values()))


def _steps(tables: _Tables, grads: dict[torch.dtype, torch.Tensor]) -> Iterator[Competitor]:
    grad_ND = grads[torch.float32]
    shape = tuple(grad_ND.shape)
    for name, table in tables.ours.items():
        output = (shape, table.output_type)
        if name in LIMITS:
            limit = limit_of(tables.yardsticks[name], tables.batches, grad_ND)
            yield Competitor(LIMITS[name], limit, _base_of_limit(name), output)
        call = partial(_step, table, tables.batches, grads[table.output_type])
        yield Competitor(name, call, _bases(name), output)


def _base_of_limit(name: str) -> str | None:
    """What a type's yardstick is compared with: the one of float32."""
    return None if name == FLOAT32 else LIMITS[FLOAT32]


def _bases(name: str) -> tuple[str, ...]:
    """What a type is compared with: its own yardstick and float32, rows of 8 bits with bfloat16."""
    if name in CODED:
        return (BFLOAT16,)
    own = (LIMITS[name],) if name in LIMITS else ()
    return own if name == FLOAT32 else (*own, FLOAT32)


def _limit_of_lookup(yardstick: Yardstick, batches: list[Batch], turn: int) -> torch.Tensor:
    return yardstick.lookup(batches[turn % len(batches)].index)


def _lookup(table: RecStoreTable, batches: list[Batch], turn: int) -> torch.Tensor:
    return table.lookup(batches[turn % len(batches)].ids)


def _step(table: RecStoreTable, batches: list[Batch], grad_ND: torch.Tensor, turn: int) -> None:
    table.step(batches[turn % len(batches)].ids, grad_ND)
