"""A table against a plain dict: after any sequence of calls both hold the same rows, and reading is free."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from own_draws import fresh_name
from torch import Tensor

from recstore_ops import DistEmbedding, SparseOptimizer, Table, TableConfig, table_statistics
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("test")

Array = npt.NDArray[np.float32]

DIM = 2
MODULES = 3
LEARNING_RATE = np.float32(0.5)
EPS = np.float32(1e-10)
POOL = [-(2**63), 1 - 2**63, -(2**32), -1, 0, 1, 2, 3, 2**40, 2**63 - 2, 2**63 - 1]
"""The ids drawn: few, so that calls meet each other's rows, and both ends of int64."""

ids_of_a_call = st.lists(st.sampled_from(POOL), max_size=6)
# Multiples of 1/4 are summed without rounding, in whatever order.
rows_of_a_call = st.lists(
    st.tuples(st.sampled_from(POOL), st.integers(-8, 8).map(lambda quarter: quarter / 4)), max_size=6
)
Batch = list[tuple[int, float]]


@dataclass
class Row:
    weight: Array
    squares: Array


def as_tensor(ids: list[int], unsigned: bool) -> Tensor:
    """The ids as int64, or the same bits as uint64."""
    signed = torch.tensor(ids, dtype=torch.int64)
    return signed.view(torch.uint64) if unsigned else signed


def unzipped(batch: Batch) -> tuple[list[int], Tensor]:
    """The ids of a batch, and for each a row of two different values."""
    values = torch.tensor([[value, -2 * value] for _, value in batch]).reshape(-1, DIM)
    return [id for id, _ in batch], values


class TableAndDict(RuleBasedStateMachine):
    """Makes the same calls on a table, which several modules share, and on a dict."""

    @initialize(kind=st.sampled_from(["sgd", "adagrad"]))
    def open_table(self, kind: str) -> None:
        self.name = fresh_name()
        self.kind = kind
        self.start()
        self.initial = self.read_pool()

    def start(self) -> None:
        self.modules = [self.new_module() for _ in range(MODULES)]
        self.rows: dict[int, Row] = {}
        self.pending: list[list[Batch]] = [[] for _ in range(MODULES)]
        self.step_count = 0

    def new_module(self) -> DistEmbedding:
        optimizer = {"kind": self.kind, "lr": float(LEARNING_RATE)}
        initializer = {"kind": "uniform", "a": -1.0}
        # Meant to be shared: else the process is searched for earlier modules in reference cycles.
        return DistEmbedding(
            None, DIM, self.name, optimizer=optimizer, initializer=initializer, block_size=3, on_existing="share"
        )

    @property
    def handle(self) -> Tensor:
        return self.modules[0].table.handle

    def read_pool(self) -> dict[int, Array]:
        rows = operators.emb_read(self.handle, torch.tensor(POOL), DIM).numpy()
        return {id: row.copy() for id, row in zip(POOL, rows, strict=True)}

    def created(self, id: int) -> Row:
        new = Row(self.initial[id].copy(), np.zeros(DIM, np.float32))
        return self.rows.setdefault(id, new)

    def take_step(self, chunks: list[Batch]) -> None:
        sums: dict[int, Array] = {}
        for id, value in itertools.chain(*chunks):
            gradient = np.array([value, -2 * value], np.float32)
            sums[id] = sums.get(id, np.zeros(DIM, np.float32)) + gradient
        for id, gradient in sums.items():
            row = self.created(id)
            row.squares = row.squares + gradient**2
            scale = np.sqrt(row.squares + EPS) if self.kind == "adagrad" else np.float32(1)
            row.weight = row.weight - LEARNING_RATE * gradient / scale
        self.step_count += 1

    @rule(ids=ids_of_a_call, unsigned=st.booleans())
    def read(self, ids: list[int], unsigned: bool) -> None:
        rows = operators.emb_read(self.handle, as_tensor(ids, unsigned), DIM)
        expected = [self.rows[id].weight if id in self.rows else self.initial[id] for id in ids]
        np.testing.assert_allclose(rows.numpy(), np.reshape(expected, (-1, DIM)), rtol=1e-5, atol=1e-6)

    @rule(batch=rows_of_a_call, unsigned=st.booleans())
    def write(self, batch: Batch, unsigned: bool) -> None:
        ids, values = unzipped(batch)
        operators.emb_write(self.handle, as_tensor(ids, unsigned), values)
        for id, value in zip(ids, values.numpy(), strict=True):
            self.created(id).weight = value.copy()

    @rule(batch=rows_of_a_call, unsigned=st.booleans())
    def update(self, batch: Batch, unsigned: bool) -> None:
        ids, gradients = unzipped(batch)
        operators.emb_update(self.handle, as_tensor(ids, unsigned), gradients)
        self.take_step([batch])

    @rule(number=st.integers(0, MODULES - 1), batch=rows_of_a_call, unsigned=st.booleans())
    def collect(self, number: int, batch: Batch, unsigned: bool) -> None:
        ids, gradients = unzipped(batch)
        self.modules[number](as_tensor(ids, unsigned)).backward(gradients)
        self.pending[number].append(batch)

    @rule(numbers=st.sets(st.integers(0, MODULES - 1), min_size=1))
    def step(self, numbers: set[int]) -> None:
        SparseOptimizer(modules=[self.modules[number] for number in numbers]).step()
        chunks = [batch for number in numbers for batch in self.pending[number]]
        if chunks:
            self.take_step(chunks)
        for number in numbers:
            self.pending[number] = []

    @rule(number=st.integers(0, MODULES - 1))
    def reset_trace(self, number: int) -> None:
        self.modules[number].reset_trace()
        self.pending[number] = []

    @rule(ids=ids_of_a_call, times=st.integers(1, 2))
    def delete(self, ids: list[int], times: int) -> None:
        for _ in range(times):
            operators.hashtable_delete(self.handle, torch.tensor(ids, dtype=torch.int64))
        for id in ids:
            self.rows.pop(id, None)

    @rule(ids=ids_of_a_call)
    def insert(self, ids: list[int]) -> None:
        index, _ = operators.hashtable_lookup(self.handle, torch.tensor(ids, dtype=torch.int64), DIM, True)
        assert len(set(index.tolist())) == len(set(ids))
        for id in ids:
            self.created(id)

    @rule()
    def clear(self) -> None:
        operators.hashtable_clear(self.handle)
        self.rows = {}

    @rule(number=st.integers(0, MODULES - 1))
    def reopen(self, number: int) -> None:
        self.modules[number] = self.new_module()
        self.pending[number] = []

    @rule()
    def drop(self) -> None:
        operators.drop_table(self.name)
        self.start()

    @invariant()
    def both_hold_the_same_rows(self) -> None:
        assert sorted(operators.hashtable_ids(self.handle).tolist()) == sorted(self.rows)
        for id, row in self.read_pool().items():
            expected = self.rows[id].weight if id in self.rows else self.initial[id]
            np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)

    @invariant()
    def the_statistics_agree(self) -> None:
        statistics = table_statistics(self.name)
        assert statistics["rows"] == operators.hashtable_size(self.handle) == len(self.rows)
        assert statistics["inserts"] - statistics["deletes"] == len(self.rows)
        assert statistics["step"] == self.step_count

    def teardown(self) -> None:
        operators.drop_table(self.name)


TestAfterAnySequenceOfCallsATableHoldsWhatADictWould = TableAndDict.TestCase
TestAfterAnySequenceOfCallsATableHoldsWhatADictWould.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def scattered(start: int, stop: int) -> Tensor:
    """Distinct ids all over int64: multiples of an odd number, modulo 2^64."""
    return torch.arange(start, stop) * -7046029254386353131


def test_a_table_that_grows_past_five_million_rows_keeps_every_row(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 1, TableConfig(initializer={"kind": "zeros"}))
    total, chunk = 5_200_000, 400_000
    starts = range(0, total, chunk)

    for start in starts:
        numbers = torch.arange(start, start + chunk)
        operators.emb_write(table.handle, scattered(start, start + chunk), numbers[:, None].float())

    assert len(table) == total
    for start in starts:
        rows = operators.emb_read(table.handle, scattered(start, start + chunk), 1)
        assert torch.equal(rows[:, 0], torch.arange(start, start + chunk).float())
    operators.drop_table(table.name)


def test_reading_a_million_unknown_ids_leaves_a_table_as_it_was(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, 2, table_name())
    module.weight[[3, -4]] = torch.ones(2, 2)
    before = module.table.statistics()

    for start in range(10, 1_000_010, 100_000):
        ids = scattered(start, start + 100_000)
        module(ids)
        operators.hashtable_lookup(module.table.handle, ids, 2, False)

    assert module.table.statistics() == before
    assert operators.hashtable_ids(module.table.handle).tolist() == [3, -4]


def test_an_unknown_id_reads_the_same_before_and_after_it_had_a_row(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 4)
    ids = torch.tensor(POOL)
    initial = operators.emb_read(table.handle, ids, 4)

    operators.emb_update(table.handle, ids, torch.ones(len(POOL), 4))
    assert not torch.equal(operators.emb_read(table.handle, ids, 4), initial)
    operators.hashtable_delete(table.handle, ids)

    assert torch.equal(operators.emb_read(table.handle, ids, 4), initial)
