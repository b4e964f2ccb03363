"""Admission and eviction against a model of dicts, and what users see of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import drop_all_tables
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lifecycle_model import INITIAL, LifecycleModel

from recstore_ops import (
    DistEmbedding,
    HashTable,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    Table,
    TableConfig,
    _native,
    checkpoint,
    table_statistics,
)
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("test")

DIM = 2


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    """A save holds all tables of the process."""
    drop_all_tables()
    yield
    drop_all_tables()


POOL = [-(2**63), -7, 0, 1, 2, 3, 4, 5, 6, 7, 2**63 - 1]

_numbers = itertools.count()

ids = st.lists(st.sampled_from(POOL), max_size=6)
batches = st.lists(st.tuples(st.sampled_from(POOL), st.integers(-4, 4).map(lambda quarter: quarter / 4)), max_size=6)
admissions = st.one_of(
    st.none(),
    st.builds(lambda n: {"kind": "count", "threshold": n}, st.integers(1, 3)),
    st.builds(lambda n, m: {"kind": "count", "threshold": n, "halve_every": m}, st.integers(2, 4), st.integers(1, 4)),
    st.builds(lambda n: {"kind": "sketch", "threshold": n, "epsilon": 1e-3}, st.integers(1, 3)),
    st.builds(
        lambda n, m: {"kind": "sketch", "threshold": n, "epsilon": 1e-3, "halve_every": m},
        st.integers(2, 4),
        st.integers(1, 4),
    ),
    st.builds(lambda p: {"kind": "probability", "probability": p}, st.sampled_from([0, 1])),
)


@st.composite
def evictions(draw: st.DrawFn) -> dict[str, Any] | None:
    reasons = {
        "ttl": st.integers(1, 6),
        "min_norm": st.sampled_from([0.3, 0.8]),
        "capacity": st.integers(1, 6),
    }
    chosen = draw(st.sets(st.sampled_from(list(reasons))))
    if not chosen:
        return None
    eviction: dict[str, Any] = {name: draw(reasons[name]) for name in sorted(chosen)}
    if "capacity" in eviction:
        eviction["policy"] = draw(st.sampled_from(["lru", "lfu"]))
    eviction["interval"] = draw(st.integers(1, 4))
    if draw(st.booleans()):
        eviction["delay"] = draw(st.integers(1, eviction["interval"]))
    if draw(st.booleans()):
        eviction["keep"] = [0, 5]
    return eviction


calls = st.one_of(
    st.tuples(st.just("update"), batches),
    st.tuples(st.just("update"), batches),
    st.tuples(st.just("update"), batches),
    st.tuples(st.just("write"), batches),
    st.tuples(st.just("insert"), ids),
    st.tuples(st.just("delete"), ids),
    st.tuples(st.just("evict"), st.none()),
    st.tuples(st.just("reload"), st.none()),
    st.tuples(st.just("clear"), st.none()),
)


class Subject:
    """A table and its model."""

    def __init__(self, admission: dict[str, Any] | None, eviction: dict[str, Any] | None, path: Path) -> None:
        self.name = f"lifecycle/{next(_numbers)}"
        config = TableConfig(
            initializer={"kind": "constant", "value": INITIAL},
            optimizer={"kind": "sgd", "lr": 1.0},
            block_size=3,
            admission=admission,
            eviction=eviction,
        )
        self.table = Table(self.name, DIM, config)
        self.model = LifecycleModel(DIM, admission, eviction)
        self.path = path

    def act(self, call: str, argument: Any) -> None:
        getattr(self, f"_{call}")(argument)
        model, handle = self.model, self.table.handle
        assert set(operators.hashtable_ids(handle).tolist()) == model.rows.keys()
        expected = [model.rows.get(id, (INITIAL,) * DIM) for id in POOL]
        assert operators.emb_read(handle, torch.tensor(POOL), DIM).tolist() == [list(row) for row in expected]
        statistics = table_statistics(self.name)
        for name in ("evictions", "rejections", "step"):
            assert statistics[name] == getattr(model, name), name
        assert statistics["candidates"] == model.candidates()
        assert statistics["rows"] == statistics["inserts"] - statistics["deletes"] == len(model.rows)
        if model.eviction is not None:
            assert _native.evict_rows(self.name, True, None) == model.would_leave()

    def _update(self, batch: list[tuple[int, float]]) -> None:
        operators.emb_update(self.table.handle, *_tensors(batch))
        self.model.update(batch)

    def _write(self, batch: list[tuple[int, float]]) -> None:
        operators.emb_write(self.table.handle, *_tensors(batch))
        self.model.write(batch)

    def _insert(self, ids: list[int]) -> None:
        operators.hashtable_lookup(self.table.handle, torch.tensor(ids, dtype=torch.int64), DIM, True)
        self.model.insert(ids)

    def _delete(self, ids: list[int]) -> None:
        operators.hashtable_delete(self.table.handle, torch.tensor(ids, dtype=torch.int64))
        self.model.delete(ids)

    def _clear(self, _: None) -> None:
        operators.hashtable_clear(self.table.handle)
        self.model.clear()

    def _evict(self, _: None) -> None:
        if self.model.eviction is not None:
            assert _native.evict_rows(self.name, False, None) == self.model.evict()

    def _reload(self, _: None) -> None:
        """Saves, mostly what changed, and goes on with what is loaded."""
        checkpoint.save(self.path, kind="auto", keep=1, progress=False)
        checkpoint.load(self.path, progress=False)


def _tensors(batch: list[tuple[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([id for id, _ in batch], dtype=torch.int64)
    return ids, torch.tensor([[value] * DIM for _, value in batch]).reshape(-1, DIM)


@pytest.mark.one_server_only("each server keeps its share of a capacity")
@given(admission=admissions, eviction=evictions(), schedule=st.lists(calls, max_size=30))
@settings(max_examples=examples(1500), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_table_agrees_with_the_model(
    tmp_path: Path, admission: dict[str, Any] | None, eviction: dict[str, Any] | None, schedule: list[tuple[str, Any]]
) -> None:
    subject = Subject(admission, eviction, tmp_path / "saved")
    try:
        for call, argument in schedule:
            subject.act(call, argument)
    finally:
        operators.drop_table(subject.name)


def train(module: Any, ids: list[int]) -> None:
    module(torch.tensor(ids)).sum().backward()
    SparseOptimizer(modules=[module]).step()


def test_rare_ids_cost_no_row_and_read_as_their_initial_value(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, 4, table_name(), lr=1.0, admission={"kind": "count", "threshold": 2})
    before = module(torch.tensor([5, 6])).detach()
    train(module, [5, 5, 6])
    assert (len(module.table), module.table.statistics()["candidates"]) == (0, 2)
    assert module(torch.tensor([5, 6])).equal(before)
    train(module, [5])
    assert operators.hashtable_ids(module.table.handle).tolist() == [5]
    assert module(torch.tensor([5])).allclose(before[:1] - 1)
    assert module(torch.tensor([6])).equal(before[1:])


def test_admission_by_probability_is_of_the_id_and_the_step(table_name: Callable[[], str]) -> None:
    name, ids = table_name(), torch.arange(20_000)
    admission = {"kind": "probability", "probability": 0.25}

    def admitted(step_ids: torch.Tensor) -> set[int]:
        table = Table(name, 1, TableConfig(admission=admission))
        operators.emb_update(table.handle, step_ids, torch.ones(step_ids.numel(), 1))
        rows = set(operators.hashtable_ids(table.handle).tolist())
        operators.drop_table(name)
        return rows

    found = admitted(ids)
    assert abs(len(found) - 5_000) < 4 * (20_000 * 0.25 * 0.75) ** 0.5
    assert admitted(ids.flip(0)) == found
    assert admitted(ids[:100]) == {id for id in found if id < 100}


def test_the_padding_row_never_leaves(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, 2, table_name(), padding_idx=3, eviction={"ttl": 1, "interval": 1})
    for step in range(6):
        train(module, [100 + step])
    assert 3 in operators.hashtable_ids(module.table.handle).tolist()
    assert module(torch.tensor([3])).eq(0).all()
    assert len(module.table) < 6


def test_a_prefetch_does_not_give_rows_that_left_since(table_name: Callable[[], str]) -> None:
    client, name = RecStoreClient(), table_name()
    module = DistEmbedding(None, 2, name, lr=1.0, eviction={"ttl": 1, "interval": 1})
    initial = module(torch.tensor([1])).detach()
    train(module, [1])
    handle = client.prefetch(torch.tensor([1]), name)
    for _ in range(4):
        train(module, [2])
    assert operators.hashtable_ids(module.table.handle).tolist() == [2]
    assert client.wait_and_get(handle, 2).equal(initial)


@pytest.mark.one_server_only("each server keeps its share of a capacity")
def test_what_leaves_can_be_seen_before(table_name: Callable[[], str]) -> None:
    table = HashTable(2, table_name(), eviction={"capacity": 2, "policy": "lfu"})
    for ids in ([1, 2, 3], [1, 2], [1]):
        train(table, ids)
    assert table.evict(dry_run=True).tolist() == [3]
    assert table.ids().tolist() == [1, 2, 3]
    assert RecStoreClient().evict(table.name).tolist() == [3]
    assert table.ids().tolist() == [1, 2]
    plain = HashTable(2, table_name())
    with pytest.raises(ValueError, match=f'evict: table "{plain.name}" has no eviction'):
        plain.evict()
    with pytest.raises(KeyError, match='there is no table "nothing"'):
        RecStoreClient().evict("nothing")


def test_counts_that_are_halved_forget_what_comes_seldom(table_name: Callable[[], str]) -> None:
    often, candidates = 7, []
    table = HashTable(2, table_name(), admission={"kind": "count", "threshold": 6, "halve_every": 4})
    for step in range(40):
        train(table, [often, *range(1000 * (step + 1), 1000 * (step + 2))])
        candidates.append(table_statistics(table.name)["candidates"])
    assert table.ids().tolist() == [often], "4, halved to 2, then 6: with the eighth step"
    assert max(candidates) <= 3001, "those of the steps since the last halving"
    assert candidates[3::4] == [1, *[0] * 9]


def test_a_call_may_have_a_time_to_live_of_its_own(table_name: Callable[[], str]) -> None:
    table = HashTable(2, table_name(), eviction={"ttl": 2**62})
    for ids in ([1, 2, 3], [1, 2], [1]):
        train(table, ids)
    assert table.evict(dry_run=True).tolist() == []
    assert table.evict(dry_run=True, ttl=0).tolist() == [2, 3]
    assert RecStoreClient().evict(table.name, ttl=1).tolist() == [3]
    assert table.evict().tolist() == []
    assert sorted(table.ids().tolist()) == [1, 2]
    for ttl in (-1, 2**63):
        with pytest.raises(ValueError, match=f"ttl must be from 0 to before 2..63 steps, got {ttl}"):
            table.evict(ttl=ttl)


def test_collections_pass_on_admission_and_eviction(table_name: Callable[[], str]) -> None:
    own, common = {"kind": "count", "threshold": 7}, {"kind": "count", "threshold": 3}
    names = [table_name(), table_name()]
    tables = [{"name": name, "num_embeddings": None, "embedding_dim": 2} for name in names]
    RecStoreEmbeddingBagCollection([{**tables[0], "admission": own}, tables[1]], admission=common, eviction={"ttl": 9})
    configs = [Table.open(name).config for name in names]
    assert [config.admission for config in configs] == [own, common]
    assert all(config.eviction is not None and config.eviction["ttl"] == 9 for config in configs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admission": {"kind": "count"}}, "threshold"),
        ({"admission": {"kind": "count", "threshold": 0}}, "admission.threshold must be at least 1, got 0"),
        (
            {"admission": {"kind": "count", "threshold": 2, "halve_every": 0}},
            "admission.halve_every must be at least 1, got 0",
        ),
        (
            {"admission": {"kind": "sketch", "threshold": 2, "halve_every": 0}},
            "admission.halve_every must be at least 1, got 0",
        ),
        ({"admission": {"kind": "probability", "probability": 1, "halve_every": 9}}, "halve_every"),
        ({"admission": {"kind": "bloom"}}, "bloom"),
        ({"admission": "count"}, "admission must be an object"),
        ({"admission": {"kind": "probability", "probability": 1.5}}, r"must lie in \[0, 1\], got 1.5"),
        ({"admission": {"kind": "probability", "probability": float("nan")}}, "must be finite, got nan"),
        ({"admission": {"kind": "sketch", "threshold": 2, "epsilon": 0}}, "admission.epsilon must lie between 0 and 1"),
        ({"admission": {"kind": "sketch", "threshold": 2, "epsilon": 1e-12}}, "exceeds 4 GiB"),
        ({"eviction": {}}, "eviction needs ttl, min_norm or capacity"),
        ({"eviction": {"ttl": 0}}, "eviction.ttl must be at least 1, got 0"),
        (
            {"eviction": {"ttl": 5, "policy": "lfu"}},
            "eviction.policy orders the rows of a table with eviction.capacity",
        ),
        ({"eviction": {"capacity": 5, "policy": "fifo"}}, "fifo"),
        ({"eviction": {"ttl": 5, "interval": 3, "delay": 4}}, r"eviction.delay must lie in \[1, interval 3\], got 4"),
        ({"eviction": {"min_norm": -1.0}}, "eviction.min_norm must be positive, got -1"),
        ({"eviction": {"age": 5}}, "age"),
    ],
)
def test_an_invalid_life_is_refused(table_name: Callable[[], str], options: dict[str, Any], message: str) -> None:
    name = table_name()
    with pytest.raises(ValueError, match=message):
        DistEmbedding(None, 2, name, **options)
    assert _native.find_table(name) is None


def test_a_hash_table_cannot_insert_on_lookup_and_admit(table_name: Callable[[], str]) -> None:
    with pytest.raises(ValueError, match="insert_on_lookup gives every id a row, and admission does not"):
        HashTable(2, table_name(), insert_on_lookup=True, admission={"kind": "count", "threshold": 2})


def test_another_life_is_another_table(table_name: Callable[[], str]) -> None:
    name = table_name()
    kept = DistEmbedding(None, 2, name, eviction={"ttl": 5})
    assert DistEmbedding(None, 2, name, eviction={"ttl": 5}).table.table_id == kept.table.table_id
    with pytest.raises(ValueError, match=r'"ttl":5.*"ttl":6'):
        DistEmbedding(None, 2, name, eviction={"ttl": 6})
