"""Sums of the gradients of duplicate ids, and distinct ids, beside torch's own operators.

Shape suffixes: N ids, D dim, U distinct ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from benches import ids
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.ids import turn_of
from benches.measured import Axis, Case, Competitor
from benches.scale import Scale

CELL = "merge"
OURS, TORCH = "recstore", "torch"
MERGE, UNIQUE = "merge_gradients", "unique"

_IDS, _SHARES, _DIMS, _BATCHES = 200_000, (0.05, 0.42), (16, 64), 8


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    rounds = len(_SHARES) * (len(_DIMS) + 1) * scale.steps.rounds
    return [Stage(CELL, "gradients of duplicates", rounds, lambda: _cases(scale))]


def _cases(scale: Scale) -> Iterator[Case]:
    for share in _SHARES:
        batches = [ids.with_duplicates(scale.of(_IDS), share, seed) for seed in range(_BATCHES)]
        for dim in _DIMS:
            yield _merging(batches, dim, _axes(MERGE, share, dim), scale)
        yield _finding(batches, _axes(UNIQUE, share, "-"), scale)


def _axes(operator: str, share: float, dim: Axis) -> dict[str, Axis]:
    return {"operator": operator, "ids": _IDS, "duplicates": f"{share:.0%}", "dim": dim, "threads": 2}


def _merging(batches: list[Tensor], dim: int, axes: dict[str, Axis], scale: Scale) -> Case:
    batch, grad_ND = turn_of(batches), gradients(len(batches[0]), dim)
    output = (tuple(grad_ND.shape), torch.float32)
    competitors = [
        Competitor(TORCH, lambda turn: _merged_by_torch(batch(turn), grad_ND), output=output),
        Competitor(OURS, lambda turn: torch.ops.recstore.merge_gradients(batch(turn), grad_ND), TORCH, output),
    ]
    return Case(CELL, axes, competitors, scale.steps, read_first=[grad_ND])


def _finding(batches: list[Tensor], axes: dict[str, Axis], scale: Scale) -> Case:
    batch, output = turn_of(batches), (tuple(batches[0].shape), torch.int64)
    competitors = [
        Competitor(TORCH, lambda turn: torch.unique(batch(turn), return_inverse=True), output=output),
        Competitor(OURS, lambda turn: torch.ops.recstore.unique(batch(turn)), TORCH, output),
    ]
    return Case(CELL, axes, competitors, scale.steps)


def _merged_by_torch(ids_N: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
    unique_U, inverse_N = torch.unique(ids_N, return_inverse=True)
    return unique_U, grad_ND.new_zeros(len(unique_U), grad_ND.shape[1]).index_add_(0, inverse_N, grad_ND)
