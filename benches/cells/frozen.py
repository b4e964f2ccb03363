"""A perceptron trained over frozen tables, beside the same over rows that were read without gradients.

Shape suffixes: B examples, F features, D dim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import torch
from torch import Tensor, nn

from benches import ids
from benches.cells.stage import Stage
from benches.competitors.recstore import ADAGRAD, fill, new_name
from benches.ids import KINDS, IdKind, turn_of
from benches.measured import Axis, Case, Competitor
from benches.scale import Scale
from recstore_ops import KeyedJaggedTensor, RecStoreClient, RecStoreEmbeddingBagCollection

CELL = "frozen"
FROZEN, NO_GRAD = "frozen tables", "rows read under no_grad"

_TABLES, _ROWS, _HIDDEN, _BATCHES = 26, 50_000, 64, 8
_SHAPES = ((64, 256), (64, 4_096), (16, 256), (16, 4_096))
"""Dim, and examples a batch."""


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, "frozen tables", len(KINDS) * len(_SHAPES) * scale.steps.rounds, lambda: _cases(scale))]


def _cases(scale: Scale) -> Iterator[Case]:
    for (dim, examples), kind in product(_SHAPES, KINDS):
        names = [new_name() for _ in range(_TABLES)]
        try:
            yield _case(names, dim, examples, kind, scale)
        finally:
            for name in names:
                RecStoreClient().drop(name)


def _case(names: list[str], dim: int, examples: int, kind: IdKind, scale: Scale) -> Case:
    rows, batch_size = scale.of(_ROWS), scale.of(examples)
    configs = [
        {"name": name, "num_embeddings": None, "embedding_dim": dim, "feature_names": [name], "pooling": "sum"}
        for name in names
    ]
    bags = RecStoreEmbeddingBagCollection(configs, optimizer=ADAGRAD)
    for module in bags.embedding_bags.values():
        fill(module.table.handle, dim, ids.all_ids(rows, rows, kind))
    bags.requires_grad_(False)
    batch = turn_of([_features(names, rows, batch_size, kind, seed) for seed in range(_BATCHES)])
    dense = nn.Sequential(nn.Linear(_TABLES * dim, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))

    def step(features: KeyedJaggedTensor, reading: AbstractContextManager[object]) -> Tensor:
        with reading:
            pooled_BX = bags(features).flatten(1)
        loss = dense(pooled_BX).mean()
        loss.backward()
        return loss

    axes: dict[str, Axis] = {
        "tables": _TABLES,
        "rows a table": _ROWS,
        "dim": dim,
        "examples": examples,
        "threads": 2,
        "ids": kind,
    }
    competitors = [
        Competitor(NO_GRAD, lambda turn: step(batch(turn), torch.no_grad())),
        Competitor(FROZEN, lambda turn: step(batch(turn), nullcontext()), NO_GRAD),
    ]
    return Case(CELL, axes, competitors, scale.steps, output="as it is")


def _features(keys: list[str], rows: int, examples: int, kind: IdKind, seed: int) -> KeyedJaggedTensor:
    index = ids.draw(rows, len(keys) * examples, "uniform", seed)
    return KeyedJaggedTensor(keys, ids.ids_of(index, kind), lengths=torch.ones(len(index), dtype=torch.int64))
