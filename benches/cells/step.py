"""Full steps: lookup, backward, optimizer step. One table, one id a bag.

Shape suffixes: N ids, D dim, U distinct ids, B bags.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benches import ids
from benches.cells.one_table import OURS, YARDSTICK, OneTable, present
from benches.cells.setting import Setting
from benches.competitors import fbgemm
from benches.ids import Batch, Distribution, Grouped, turn_of
from benches.measured import Case, Competitor
from benches.scale import Scale
from benches.yardstick import Yardstick

CELL = "step"
EMBEDDING_BAG = "nn.EmbeddingBag"


def step_case(table: OneTable, setting: Setting, scale: Scale, cell: str = CELL) -> Case:
    """The yardstick's step, our module and optimizer, FBGEMM's fused step, torch's."""
    batches = ids.batches(table.rows, scale.of(setting.batch), setting.drawn, kind=setting.ids)
    grad_ND = gradients(len(batches[0].index), table.dim)
    return Case(
        cell,
        setting.axes(),
        _competitors(table, setting, batches, grad_ND),
        scale.steps,
        setting.output,
        setting.threads,
        setting.calls,
        read_first=[grad_ND],
        absent=fbgemm.absent(),
    )


def gradients(count: int, dim: int) -> Tensor:
    """Returns gradients `[count, dim]`, ready and contiguous."""
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(0)) * 0.01


def limit_of(
    yardstick: Yardstick, batches: list[Batch], grad_ND: Tensor, drawn: Distribution = "uniform"
) -> Callable[[int], Tensor]:
    """The yardstick's step on each batch: y1 and y2, with y3 between them unless rows are drawn uniformly."""
    if drawn == "uniform":
        batch = turn_of(batches)
        return lambda turn: yardstick.step(batch(turn).index, batch(turn).distinct, grad_ND)
    grouped = turn_of([(batch, Grouped.of(batch.index)) for batch in batches])

    def step(turn: int) -> Tensor:
        batch, groups = grouped(turn)
        return yardstick.step(batch.index, batch.distinct, grad_ND, groups)

    return step


def _competitors(table: OneTable, setting: Setting, batches: list[Batch], grad_ND: Tensor) -> list[Competitor]:
    offsets_B = torch.arange(len(grad_ND))
    bag_ends_B = torch.arange(len(grad_ND) + 1)
    output = table.output(len(grad_ND))
    theirs = table.fbgemm
    batch = turn_of(batches)
    return present(
        Competitor(YARDSTICK, limit_of(table.yardstick, batches, grad_ND, setting.drawn), output=output),
        Competitor(OURS, lambda turn: table.ours.step(batch(turn).ids, grad_ND), YARDSTICK, output),
        theirs
        and Competitor(fbgemm.NAME, lambda turn: theirs.step(batch(turn).index, bag_ends_B, grad_ND), OURS, output),
        Competitor(EMBEDDING_BAG, lambda turn: table.torch.step(batch(turn).index, offsets_B, grad_ND), OURS, output),
    )
