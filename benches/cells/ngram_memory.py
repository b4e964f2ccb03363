"""What a memory of 10 million rows adds to a step of a small GPT, and what it does to the loss."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch

from benches.cells.stage import Stage
from benches.competitors.recstore import fill, new_name
from benches.gpt import Size, Training, texts_of
from benches.ids import turn_of
from benches.measured import Axis, Case, Competitor, Figure
from benches.scale import Scale
from recstore_ops import NGramMemory, RecStoreClient

CELL = "ngram_memory"
GPT, WITH_MEMORY = "GPT", "GPT with a memory"

SIZES = (Size(128, 2, 4, 64, 16, 1_000), Size(384, 6, 8, 128, 8, 8_000))
"""That of examples/ngram_memory.py, and a larger one."""

_ROWS, _DIM, _FUNCTIONS, _STEPS, _BATCHES = 10_000_000, 64, 4, 100, 8
_FILL_CHUNK = 262_144


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """A stage for each size."""
    if CELL not in chosen:
        return []
    sizes = (
        SIZES
        if scale.is_full
        else [each._replace(width=4 * each.heads, layers=1, length=16, texts=1) for each in SIZES]
    )
    return [Stage(CELL, each.name, scale.steps.rounds, partial(_outcomes, each, scale)) for each in sizes]


def _outcomes(size: Size, scale: Scale) -> Iterator[Case | Figure]:
    rows = scale.of(_ROWS // _FUNCTIONS)
    steps = scale.of(_STEPS)
    memory = NGramMemory(size.width, rows, _DIM, new_name(), heads=_FUNCTIONS // 2, optimizer="adagrad")
    try:
        fill(memory.table.table.handle, _DIM, torch.arange(_FUNCTIONS * rows).split(_FILL_CHUNK))
        without, remembering = Training(size, None), Training(size, memory)
        for name, training in ((GPT, without), (WITH_MEMORY, remembering)):
            losses = [training.step(texts_of(size, number)) for number in range(steps)]
            yield Figure(CELL, f"loss after {steps} steps, {size.name}, {name}", losses[-1].item(), "")
        yield _case(size, _FUNCTIONS * rows, without, remembering, scale)
    finally:
        RecStoreClient().drop(memory.table.name)


def _case(size: Size, rows: int, without: Training, remembering: Training, scale: Scale) -> Case:
    batch = turn_of([texts_of(size, _STEPS + number) for number in range(_BATCHES)])
    axes: dict[str, Axis] = {"GPT": size.name, "rows": rows, "dim": _DIM, "threads": 2}
    competitors = [
        Competitor(GPT, lambda turn: without.step(batch(turn))),
        Competitor(WITH_MEMORY, lambda turn: remembering.step(batch(turn)), GPT),
    ]
    return Case(CELL, axes, competitors, scale.steps, output="as it is")
