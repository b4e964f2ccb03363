"""Full steps of 26 tables in the hands of all libraries that have such tables, in one process; for the picture in docs.

Shape suffixes: F features, B examples, N ids of all features, D dim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from benches import ids
from benches.cells.one_table import OURS
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.competitors import fbgemm, sharded_torchrec
from benches.competitors.fbgemm import FbgemmTables
from benches.competitors.recstore import ADAGRAD, fill, new_name
from benches.competitors.torch_modules import TorchCollection
from benches.ids import KINDS, IdKind, turn_of
from benches.measured import Axis, Case, Competitor
from benches.scale import Scale
from recstore_ops import KeyedJaggedTensor, RecStoreClient, RecStoreEmbeddingBagCollection, SparseOptimizer

CELL = "peers"
EMBEDDING_BAG, TORCHREC = "nn.EmbeddingBag", "TorchRec"

TABLES, ROWS, EXAMPLES, DIMS = 26, 100_000, 4_096, (16, 128)
_BATCHES = 8


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage a dim and kind of ids."""
    if CELL not in chosen:
        return []
    return [
        Stage(
            CELL,
            f"{TABLES} tables of dim {dim} of everyone, ids {kind}",
            scale.steps.rounds,
            partial(_cases, scale, dim, kind),
        )
        for dim in DIMS
        for kind in KINDS
    ]


def _cases(scale: Scale, dim: int, kind: IdKind) -> Iterator[Case]:
    rows, examples = scale.of(ROWS), scale.of(EXAMPLES)
    drawn = [ids.draw(rows, TABLES * examples, "uniform", seed).view(TABLES, examples) for seed in range(_BATCHES)]
    grad_BFD = gradients(examples * TABLES, dim).view(examples, TABLES, dim)
    axes: dict[str, Axis] = {
        "tables": TABLES,
        "rows a table": ROWS,
        "dim": dim,
        "examples": EXAMPLES,
        "ids a bag": 1,
        "threads": 2,
        "ids": kind,
    }
    with ExitStack() as opened:
        competitors = [opened.enter_context(_ours(rows, drawn, grad_BFD, kind))]
        if fbgemm.is_installed():
            competitors.append(_fbgemm(rows, drawn, grad_BFD))
        competitors.append(_embedding_bags(rows, drawn, grad_BFD))
        if sharded_torchrec.is_installed():
            competitors.append(opened.enter_context(_torchrec(rows, drawn, grad_BFD)))
        absent = (*fbgemm.absent(), *(() if sharded_torchrec.is_installed() else (TORCHREC,)))
        yield Case(CELL, axes, competitors, scale.steps, read_first=[grad_BFD], absent=absent)


def _output(grad_BFD: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(grad_BFD.shape), torch.float32


@contextmanager
def _ours(rows: int, drawn: list[Tensor], grad_BFD: Tensor, kind: IdKind) -> Iterator[Competitor]:
    names, dim = [new_name() for _ in range(TABLES)], grad_BFD.shape[-1]
    bags = RecStoreEmbeddingBagCollection(
        [
            {"name": name, "num_embeddings": None, "embedding_dim": dim, "feature_names": [name], "pooling": "sum"}
            for name in names
        ],
        optimizer=ADAGRAD,
    )
    optimizer = SparseOptimizer(modules=[bags])
    lengths = torch.ones(drawn[0].numel(), dtype=torch.int64)
    values = [ids.ids_of(index_FB.flatten(), kind) for index_FB in drawn]
    batch = turn_of([KeyedJaggedTensor(names, ids_N, lengths=lengths) for ids_N in values])

    def step(turn: int) -> None:
        bags(batch(turn)).backward(grad_BFD)
        optimizer.step()

    try:
        for module in bags.embedding_bags.values():
            fill(module.table.handle, dim, ids.all_ids(rows, rows, kind))
        yield Competitor(OURS, step, output=_output(grad_BFD))
    finally:
        for name in names:
            RecStoreClient().drop(name)


def _fbgemm(rows: int, drawn: list[Tensor], grad_BFD: Tensor) -> Competitor:
    tables = FbgemmTables([rows] * TABLES, grad_BFD.shape[-1])
    batch, offsets = turn_of([index_FB.flatten() for index_FB in drawn]), torch.arange(drawn[0].numel() + 1)
    grad_BD = grad_BFD.view(len(grad_BFD), -1)
    return Competitor(fbgemm.NAME, lambda turn: tables.step(batch(turn), offsets, grad_BD), OURS, _output(grad_BFD))


def _embedding_bags(rows: int, drawn: list[Tensor], grad_BFD: Tensor) -> Competitor:
    tables, batch = TorchCollection(TABLES, rows, grad_BFD.shape[-1]), turn_of(drawn)
    return Competitor(EMBEDDING_BAG, lambda turn: tables.step(batch(turn), grad_BFD), OURS, _output(grad_BFD))


@contextmanager
def _torchrec(rows: int, drawn: list[Tensor], grad_BFD: Tensor) -> Iterator[Competitor]:
    keys, grad_BD = [f"f{number}" for number in range(TABLES)], grad_BFD.view(len(grad_BFD), -1)
    with sharded_torchrec.alone():
        collection = sharded_torchrec.sharded_collection(keys, rows, grad_BFD.shape[-1], "table-wise")
        batch = turn_of(sharded_torchrec.batches(keys, drawn))
        yield Competitor(
            TORCHREC, lambda turn: collection(batch(turn)).values().backward(grad_BD), OURS, _output(grad_BFD)
        )
