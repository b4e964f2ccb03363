"""Collections of 26 tables with sum pooling: forward, and a full step. One shape has MLPerf's sizes.

Shape suffixes: F features, B examples, N ids of all features, D dim, U distinct rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from benches import ids, rounds
from benches.cells.one_table import OURS, YARDSTICK
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.competitors import fbgemm
from benches.competitors.fbgemm import FbgemmTables
from benches.competitors.recstore import ADAGRAD, fill, new_name
from benches.ids import DENSE, IN_RANDOM_ORDER, KINDS, SPREAD, IdKind, turn_of
from benches.measured import Axis, Case, Competitor, Figure
from benches.scale import Scale
from benches.yardstick import Yardstick
from recstore_ops import KeyedJaggedTensor, RecStoreClient, RecStoreEmbeddingBagCollection, SparseOptimizer

CELL = "collection"
FORWARD, STEP = "forward", "step"

TABLES, _ROWS, _EXAMPLES, _BATCHES = 26, 200_000, 4_096, 8

Bag = int | Literal["MLPerf's"]
"""Ids a bag of every table, or of each what MLPerf's DLRM has."""

MLPERF: Bag = "MLPerf's"
# fmt: off
_MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)
# fmt: on
_MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_MLPERF_SHARE = 100
"""Rows of each table, of which this one part is measured, and ids a bag.

Source: MLCommons, training benchmarks v3.0 and later, `recommendation_v2/torchrec_dlrm`: `--num_embeddings_per_feature`
and `--multi_hot_sizes` of its README.
"""

SHAPES: tuple[tuple[int, Bag], ...] = ((128, 1), (16, 1), (16, 20), (128, MLPERF))
"""Dim, and ids a bag."""
_OF_ONE_EXAMPLE = (16, 1)
"""The shape in which a single example is measured too, and rows in random order."""
_ONES, _ONES_BEFORE, _ONES_TAKEN = 256, 200, 2_000


@dataclass(frozen=True)
class _Batch:
    """One batch, for each competitor.

    Attributes:
        features: for the collection: ids.
        index: int64, `[N]`, feature by feature: row numbers within each table, for FBGEMM.
        records: int64, `[N]`: row numbers in one table of all rows, for the yardstick.
        distinct: int64, `[U]`: the distinct ones among them.
    """

    features: KeyedJaggedTensor
    index: Tensor
    records: Tensor
    distinct: Tensor


@dataclass(frozen=True)
class _Collections:
    """The kind of our ids, and equally many rows for each competitor; `fbgemm` is None where it is not installed."""

    kind: IdKind
    yardstick: Yardstick
    bags: RecStoreEmbeddingBagCollection
    optimizer: SparseOptimizer
    fbgemm: FbgemmTables | None


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage a shape and kind of ids."""
    if CELL not in chosen:
        return []
    count = 4 * scale.steps.rounds
    return [
        Stage(
            CELL,
            f"{TABLES} tables of dim {dim}, {bag} ids a bag, ids {kind}",
            count,
            partial(_cases, scale, dim, bag, kind),
        )
        for dim, bag in SHAPES
        for kind in (DENSE, IN_RANDOM_ORDER, SPREAD)
        if kind in KINDS or (dim, bag) == _OF_ONE_EXAMPLE
    ]


def _rows(bag: Bag) -> list[int]:
    """The rows of each table."""
    return [_ROWS] * TABLES if isinstance(bag, int) else [max(1, rows // _MLPERF_SHARE) for rows in _MLPERF_ROWS]


def _bags(bag: Bag) -> list[int]:
    """The ids of a bag of each table."""
    return [bag] * TABLES if isinstance(bag, int) else list(_MLPERF_BAGS)


def _cases(scale: Scale, dim: int, bag: Bag, kind: IdKind) -> Iterator[Case | Figure]:
    rows, examples = [scale.of(each) for each in _rows(bag)], scale.of(_EXAMPLES)
    with _open(rows, dim, kind) as tables:
        batches = [_batch(tables, rows, examples, bag, seed) for seed in range(_BATCHES)]
        grad_BFD = gradients(examples * TABLES, dim).view(examples, TABLES, dim)
        distinct = max(len(batch.distinct) for batch in batches)
        forwards = list(_forwards(tables, batches))
        steps = list(_steps(tables, batches, grad_BFD, gradients(distinct, dim)))
        for threads in (2, 1):
            yield _case(_axes(FORWARD, dim, bag, threads, kind), forwards, scale)
            yield _case(_axes(STEP, dim, bag, threads, kind), steps, scale, grad_BFD)
        if (dim, bag) == _OF_ONE_EXAMPLE and kind in KINDS:
            ones = [_batch(tables, rows, 1, bag, seed).features for seed in range(_ONES)]
            yield from _one_example(tables, ones, gradients(TABLES, dim).view(1, TABLES, dim), scale)


def _axes(work: str, dim: int, bag: Bag, threads: int, kind: IdKind) -> dict[str, Axis]:
    return {
        "work": work,
        "tables": TABLES,
        "rows a table": _ROWS if isinstance(bag, int) else f"{bag} / {_MLPERF_SHARE}",
        "dim": dim,
        "examples": _EXAMPLES,
        "ids a bag": bag,
        "threads": threads,
        "ids": kind,
    }


def _case(axes: dict[str, Axis], competitors: list[Competitor], scale: Scale, *grads: Tensor) -> Case:
    threads = int(axes["threads"])
    return Case(CELL, axes, competitors, scale.steps, threads=threads, read_first=grads, absent=fbgemm.absent())


def _one_example(
    tables: _Collections, features: list[KeyedJaggedTensor], grad_BFD: Tensor, scale: Scale
) -> Iterator[Figure]:
    """Training by single examples, one right after the other: both halves of a step."""
    forwards, rest = [], []
    with rounds.threads(2), rounds.without_gc():
        for turn in range(scale.of(_ONES_BEFORE) + scale.of(_ONES_TAKEN)):
            start = time.perf_counter_ns()
            pooled = tables.bags(features[turn % len(features)])
            middle = time.perf_counter_ns()
            pooled.backward(grad_BFD)
            tables.optimizer.step()
            forwards.append(middle - start)
            rest.append(time.perf_counter_ns() - middle)
    for name, taken, limit in ((FORWARD, forwards, "<= 0.08"), ("backward and step", rest, "<= 0.09")):
        median = statistics.median(taken[scale.of(_ONES_BEFORE) :]) / 1e6
        text = f"{name} of one example, {TABLES} tables of dim {grad_BFD.shape[-1]}, {tables.kind}"
        yield Figure(CELL, text, median, "ms", limit)


@contextmanager
def _open(rows: list[int], dim: int, kind: IdKind) -> Iterator[_Collections]:
    names = [new_name() for _ in range(TABLES)]
    configs = [
        {"name": name, "num_embeddings": None, "embedding_dim": dim, "feature_names": [name], "pooling": "sum"}
        for name in names
    ]
    bags = RecStoreEmbeddingBagCollection(configs, optimizer=ADAGRAD)
    try:
        for module, count in zip(bags.embedding_bags.values(), rows, strict=True):
            fill(module.table.handle, dim, ids.all_ids(count, count, kind))
        theirs = FbgemmTables(rows, dim) if fbgemm.is_installed() else None
        yield _Collections(kind, Yardstick(sum(rows), dim), bags, SparseOptimizer(modules=[bags]), theirs)
    finally:
        for name in names:
            RecStoreClient().drop(name)


def _batch(tables: _Collections, rows: list[int], examples: int, bag: Bag, seed: int) -> _Batch:
    counts = [examples * length for length in _bags(bag)]
    drawn = [
        ids.draw(each, count, "uniform", seed + table * _BATCHES)
        for table, (each, count) in enumerate(zip(rows, counts, strict=True))
    ]
    firsts = accumulate(rows[:-1], initial=0)
    index, records = torch.cat(drawn), torch.cat([own + first for own, first in zip(drawn, firsts, strict=True)])
    lengths = torch.tensor(_bags(bag)).repeat_interleave(examples)
    features = KeyedJaggedTensor(tables.bags.feature_keys, ids.ids_of(index, tables.kind), lengths=lengths)
    return _Batch(features, index, records, ids.in_order_of_arrival(records))


def _output(batches: list[_Batch], dim: int) -> tuple[tuple[int, ...], torch.dtype]:
    return (batches[0].features.stride(), TABLES, dim), torch.float32


def _pooled(yardstick: Yardstick, batch: _Batch) -> Tensor:
    """y1 of bags: `[F * B, D]`, feature by feature."""
    pooled = torch.empty(TABLES * batch.features.stride(), yardstick.dim)
    yardstick.pool(batch.records, batch.features.offsets(), pooled)
    return pooled


def _forwards(tables: _Collections, batches: list[_Batch]) -> Iterator[Competitor]:
    batch, output = turn_of(batches), _output(batches, tables.yardstick.dim)
    theirs, offsets = tables.fbgemm, batches[0].features.offsets()

    def forward(turn: int) -> Tensor:
        with torch.no_grad():
            return tables.bags(batch(turn).features)

    yield Competitor(YARDSTICK, lambda turn: _pooled(tables.yardstick, batch(turn)), output=output)
    yield Competitor(OURS, forward, YARDSTICK, output)
    if theirs is not None:
        yield Competitor(fbgemm.NAME, lambda turn: theirs.lookup(batch(turn).index, offsets), OURS, output)


def _steps(tables: _Collections, batches: list[_Batch], grad_BFD: Tensor, grad_UD: Tensor) -> Iterator[Competitor]:
    batch, output = turn_of(batches), _output(batches, tables.yardstick.dim)
    theirs, offsets = tables.fbgemm, batches[0].features.offsets()
    grad_BD = grad_BFD.view(len(grad_BFD), -1)

    def gather_and_update(turn: int) -> Tensor:
        pooled = _pooled(tables.yardstick, batch(turn))
        tables.yardstick.update(batch(turn).distinct, grad_UD)
        return pooled

    def step(turn: int) -> None:
        tables.bags(batch(turn).features).backward(grad_BFD)
        tables.optimizer.step()

    yield Competitor(YARDSTICK, gather_and_update, output=output)
    yield Competitor(OURS, step, YARDSTICK, output)
    if theirs is not None:
        yield Competitor(fbgemm.NAME, lambda turn: theirs.step(batch(turn).index, offsets, grad_BD), OURS, output)
