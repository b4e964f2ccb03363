"""A lookup of a single id: what a call costs before any memory is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benches import ids
from benches.cells.stage import Stage
from benches.competitors.recstore import RecStoreTable, emb_read
from benches.ids import KINDS, IdKind
from benches.measured import Axis, Case, Competitor
from benches.scale import Scale
from benches.yardstick import INITIAL_WEIGHT

CELL = "one_id"
OURS, EMBEDDING = "emb_read", "F.embedding"

_ROWS, _DIM, _CALLS, _DIFFERENT_IDS = 1_000, 64, 10_000, 64


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, "one id", len(KINDS) * scale.lookups.rounds, lambda: _cases(scale))]


def _cases(scale: Scale) -> Iterator[Case]:
    for kind in KINDS:
        yield from _case(scale, kind)


def _case(scale: Scale, kind: IdKind) -> Iterator[Case]:
    with RecStoreTable(_ROWS, _DIM, kind=kind) as ours:
        calls, index = scale.of(_CALLS), torch.arange(_DIFFERENT_IDS)
        competitors = [
            Competitor(EMBEDDING, _embedding(_one_by_one(index, calls))),
            Competitor(OURS, _emb_read(ours.handle, _one_by_one(ids.ids_of(index, kind), calls)), EMBEDDING),
        ]
        axes: dict[str, Axis] = {"rows": _ROWS, "dim": _DIM, "threads": 2, "ids": kind}
        yield Case(CELL, axes, competitors, scale.lookups, "as it is", operations=calls)


def _one_by_one(values: Tensor, calls: int) -> list[Tensor]:
    ones = values.split(1)
    return [ones[call % len(ones)] for call in range(calls)]


def _embedding(rows: Sequence[Tensor]) -> Callable[[int], None]:
    weight, embedding = torch.full((_ROWS, _DIM), INITIAL_WEIGHT), functional.embedding

    def read_all(turn: int) -> None:
        for row in rows:
            embedding(row, weight)

    return read_all


def _emb_read(handle: Tensor, ids_of_calls: Sequence[Tensor]) -> Callable[[int], None]:
    def read_all(turn: int) -> None:
        for one in ids_of_calls:
            emb_read(handle, one, _DIM)

    return read_all
