"""Full steps of other optimizers beside AdaGrad's, 1 million rows of 64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from benches import ids
from benches.cells.one_table import YARDSTICK, OneTable, open_table
from benches.cells.setting import Setting
from benches.cells.stage import Stage
from benches.cells.step import gradients, limit_of
from benches.competitors import fbgemm
from benches.competitors.fbgemm import FbgemmTables
from benches.competitors.recstore import RecStoreTable
from benches.competitors.torch_modules import SparseAdamTable
from benches.ids import Batch, turn_of
from benches.measured import Case, Competitor
from benches.scale import Scale
from benches.yardstick import LR, Yardstick

CELL = "optimizers"
ADAGRAD, ADAM, FTRL, ROWWISE, SPARSE_ADAM = "AdaGrad", "Adam", "FTRL", "row-wise AdaGrad", "torch SparseAdam"
FBGEMM_ROWWISE = "FBGEMM row-wise"

LIMITS = {ADAM: ("yardstick, Adam", "adam"), FTRL: ("yardstick, FTRL", "ftrl")}
"""The yardsticks of other optimizers: their names, and the rule of each."""

SETTINGS = [Setting(threads=threads) for threads in (1, 2)]

_KINDS: dict[str, dict[str, Any]] = {
    ADAM: {"kind": "adam", "lr": LR},
    FTRL: {"kind": "ftrl", "lr": LR},
    ROWWISE: {"kind": "rowwise_adagrad", "lr": LR},
}


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    rounds = len(SETTINGS) * scale.steps.rounds
    return [Stage(CELL, "a table an optimizer", rounds, lambda: _cases(scale))]


def _cases(scale: Scale) -> Iterator[Case]:
    rows, dim = SETTINGS[0].rows, SETTINGS[0].dim
    with ExitStack() as opened:
        table = opened.enter_context(open_table(scale, rows, dim))
        others = {name: opened.enter_context(RecStoreTable(table.rows, dim, kind)) for name, kind in _KINDS.items()}
        batches = ids.batches(table.rows, scale.of(SETTINGS[0].batch), "uniform")
        grad_ND = gradients(len(batches[0].index), dim)
        competitors = [*_ours(table, others, batches, grad_ND), *_peers(table, batches, grad_ND)]
        absent = () if fbgemm.is_installed() else (FBGEMM_ROWWISE,)
        for setting in SETTINGS:
            yield Case(
                CELL,
                setting.axes(),
                competitors,
                scale.steps,
                setting.output,
                setting.threads,
                read_first=[grad_ND],
                absent=absent,
            )


def _ours(
    table: OneTable, others: dict[str, RecStoreTable], batches: list[Batch], grad_ND: Tensor
) -> Iterator[Competitor]:
    """The yardstick of AdaGrad, our AdaGrad, and our other optimizers against ours and their own yardsticks."""
    output, batch = table.output(len(grad_ND)), turn_of(batches)
    yield Competitor(YARDSTICK, limit_of(table.yardstick, batches, grad_ND), output=output)
    yield Competitor(ADAGRAD, _steps(table.ours, batch, grad_ND), YARDSTICK, output)
    for name, other in others.items():
        limit, rule = LIMITS.get(name, (None, ""))
        if limit is not None:
            yardstick = Yardstick(table.rows, table.dim, rule)
            yield Competitor(limit, limit_of(yardstick, batches, grad_ND), YARDSTICK, output)
        bases = (ADAGRAD,) if limit is None else (limit, ADAGRAD)
        yield Competitor(name, _steps(other, batch, grad_ND), bases, output)


def _steps(table: RecStoreTable, batch: Callable[[int], Batch], grad_ND: Tensor) -> Callable[[int], None]:
    return lambda turn: table.step(batch(turn).ids, grad_ND)


def _peers(table: OneTable, batches: list[Batch], grad_ND: Tensor) -> Iterator[Competitor]:
    output, batch = table.output(len(grad_ND)), turn_of(batches)
    sparse_adam = SparseAdamTable(table.rows, table.dim)
    yield Competitor(SPARSE_ADAM, lambda turn: sparse_adam.step(batch(turn).index, grad_ND), ADAM, output)
    if fbgemm.is_installed():
        rowwise, offsets_B = FbgemmTables([table.rows], table.dim, "rowwise_adagrad"), torch.arange(len(grad_ND) + 1)
        yield Competitor(
            FBGEMM_ROWWISE, lambda turn: rowwise.step(batch(turn).index, offsets_B, grad_ND), ROWWISE, output
        )
