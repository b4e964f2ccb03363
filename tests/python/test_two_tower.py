"""The two towers: vectors, the loss against a plain double loop, gradients, and how frequent items are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recstore_ops import SparseOptimizer
from recstore_ops.training import Batch, NnTables, StoreTables, concatenate
from recstore_ops.training.data.query_items import QueryItemSplit, first_of_each, row_keys, select_fields
from recstore_ops.training.models import TwoTower
from recstore_ops.training.models.item_frequency import ItemFrequency

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]
NUM_IDS, DIM, VECTOR_DIM = 12, 3, 5
# Six rows of the fields user, item, shop, of which item and shop are the item. Rows 0, 3 and 5 have one item, with its
# ids in another order in row 3; row 4 has the ids of row 1 with another value.
BATCH = Batch(
    ids=torch.tensor([0, 5, 6, 9, 1, 2, 7, 10, 0, 8, 3, 6, 5, 9, 4, 7, 10, 5, 6, 9]),
    values=torch.tensor([1.0] * 7 + [0.5] + [1.0] * 8 + [2.0] + [1.0] * 3),
    offsets=torch.tensor([0, 1, 3, 4, 6, 7, 8, 9, 10, 10, 11, 13, 14, 15, 16, 17, 17, 19, 20]),
    labels=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0]),
    num_fields=3,
    dense=torch.tensor([[0.5], [-1.0], [2.0], [0.0], [1.0], [3.0]]),
)
assert BATCH.values is not None
assert BATCH.dense is not None
DOUBLE = replace(BATCH, values=BATCH.values.double(), dense=BATCH.dense.double())
ITEMS = (1, 2)
SAME_ITEM = [[0, 3, 5], [1], [2], [4]]
"""Rows of one item together."""


def double_tables(name: str, dim: int, std: float = 0.0) -> nn.Module:
    return nn.Embedding(NUM_IDS, dim, dtype=torch.float64)


def make(tables: Callable[..., nn.Module] = double_tables, **options: Any) -> TwoTower:
    torch.manual_seed(0)
    defaults = {"hidden": (4,), "vector_dim": VECTOR_DIM, "temperature": 0.3, "init_std": 0.5, "num_dense": 1}
    model = TwoTower(tables, DIM, num_fields=3, items=ITEMS, **{**defaults, **options})
    return model.double() if tables is double_tables else model


def tower_by_numpy(tower: nn.Module, inputs: NDArray) -> NDArray:
    *hidden, last = (layer for layer in tower.children() if isinstance(layer, nn.Linear))
    for layer in hidden:
        inputs = np.maximum(layer.weight.detach().numpy() @ inputs + layer.bias.detach().numpy(), 0)
    vector = last.weight.detach().numpy() @ inputs + last.bias.detach().numpy()
    return vector / np.sqrt((vector**2).sum())


def vectors_by_loop(model: Any, batch: Batch) -> tuple[NDArray, NDArray]:
    """The vectors of queries and items, one row after the other."""
    values, offsets, dense = batch.values_or_ones().double().numpy(), batch.offsets_or_ones().tolist(), batch.dense
    assert dense is not None
    features = model.v.weight.detach().double().numpy()[batch.ids] * values[:, None]
    queries, items = [], []
    for row in range(len(batch)):
        user, item, shop = (features[offsets[3 * row + f] : offsets[3 * row + f + 1]].sum(0) for f in range(3))
        queries.append(tower_by_numpy(model.query_tower, np.concatenate([user, dense[row].double().numpy()])))
        items.append(tower_by_numpy(model.item_tower, np.concatenate([item, shop])))
    return np.array(queries), np.array(items)


def losses_by_loop(model: Any, batch: Batch, probability: Callable[[int], float]) -> list[float]:
    """The loss of each positive row over the first row of each item; `probability` by the item's first row."""
    queries, items = vectors_by_loop(model, batch)
    losses = []
    for row in range(len(batch)):
        if batch.labels[row] == 0:
            losses.append(0.0)
            continue
        total, own = 0.0, math.nan
        for rows in SAME_ITEM:
            corrected = math.exp(queries[row] @ items[rows[0]] / model.temperature) / probability(rows[0])
            total += corrected
            own = corrected if row in rows else own
        losses.append(-math.log(own / total))
    return losses


class TestVectors:
    @pytest.mark.parametrize("hidden", [(4,), (6, 4), ()])
    def test_follow_the_equation(self, hidden: Sequence[int]) -> None:
        model, batch = make(hidden=hidden), DOUBLE
        queries, items = vectors_by_loop(model, batch)
        np.testing.assert_allclose(model.query_vectors(batch).detach(), queries, rtol=1e-12)
        np.testing.assert_allclose(model.item_vectors(batch).detach(), items, rtol=1e-12)
        np.testing.assert_allclose(model(batch).detach(), (queries * items).sum(1) / 0.3, rtol=1e-12)

    def test_of_one_side_alone_are_the_same(self) -> None:
        model = make()
        batch = DOUBLE
        torch.testing.assert_close(model.query_vectors(model.sides.query(batch)), model.query_vectors(batch))
        torch.testing.assert_close(model.item_vectors(model.sides.item(batch)), model.item_vectors(batch))

    def test_need_the_fields_of_the_rows(self) -> None:
        with pytest.raises(ValueError, match="expected rows of 3 or 2 fields, got 1"):
            make().item_vectors(select_fields(BATCH, [0]))


class TestLosses:
    def test_are_those_of_a_double_loop_without_correction(self) -> None:
        model, batch = make(popularity_correction=False), DOUBLE
        losses, weights = model.losses(batch)
        np.testing.assert_allclose(losses.detach(), losses_by_loop(model, batch, lambda _: 1.0), rtol=1e-9)
        assert weights.tolist() == [1, 1, 0, 1, 0, 1]

    def test_take_the_logarithm_of_the_probability_off_the_scores(self) -> None:
        model, batch = make(), DOUBLE
        # Row 2's item is in every batch, row 0's in half of them, those of rows 1 and 4 in the fourth only.
        for rows in ([2], [0, 2], [2], [0, 1, 2, 3, 4, 5]):
            losses, _ = model.losses(batch.take(torch.tensor(rows)))
        probabilities = {0: 1 / 2, 1: 1 / 4, 2: 1.0, 4: 1 / 4}
        np.testing.assert_allclose(losses.detach(), losses_by_loop(model, batch, probabilities.__getitem__), rtol=1e-6)

    def test_do_not_count_items_in_evaluation_mode(self) -> None:
        model = make()
        model.eval().losses(DOUBLE)
        assert model.frequency is not None
        assert not model.frequency.times_HM.any()
        losses, _ = model.losses(DOUBLE)
        np.testing.assert_allclose(losses.detach(), losses_by_loop(model, DOUBLE, lambda _: 1.0), rtol=1e-5)

    def test_have_no_item_of_their_own_among_the_negatives(self) -> None:
        model = make(popularity_correction=False)
        losses, _ = model.losses(DOUBLE.take(torch.tensor([0, 3, 5])))
        assert losses.tolist() == [0, 0, 0]

    def test_take_rows_of_label_0_as_candidates_only(self) -> None:
        model: Any = make(popularity_correction=False)
        with_negatives, _ = model.losses(DOUBLE)
        without, _ = model.losses(DOUBLE.take(torch.tensor([0, 1, 3, 5])))
        assert (with_negatives[[0, 1, 3, 5]] > without).all()
        model.zero_grad()
        model.losses(DOUBLE)[0].sum().backward()
        gradient = model.v.weight.grad
        assert gradient is not None
        # Row 2's user is 0 and row 4's 4; 8 is row 2's item. The query of a row of label 0 is no part of any loss.
        assert gradient[8].any()
        assert not gradient[4].any()

    def test_weigh_rows_by_their_weights(self) -> None:
        weighted = replace(DOUBLE, weights=torch.tensor([2.0, 0.5, 3.0, 1.0, 1.0, 0.0]))
        losses, weights = make().losses(weighted)
        assert weights.tolist() == [2.0, 0.5, 0.0, 1.0, 0.0, 0.0]
        torch.testing.assert_close(losses, make().losses(DOUBLE)[0])

    def test_of_a_batch_without_positive_rows_are_zero_and_have_gradients(self) -> None:
        model = make()
        losses, weights = model.losses(replace(DOUBLE, labels=torch.zeros(6)))
        losses.sum().backward()
        assert not losses.any()
        assert not weights.any()

    def test_gradients_are_those_of_finite_differences(self) -> None:
        model = make(popularity_correction=False, hidden=(2,), vector_dim=3)
        names, parameters = zip(*model.named_parameters(), strict=True)

        class Losses(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, batch: Batch) -> Tensor:
                return self.model.losses(batch)[0]

        def losses(*values: Tensor) -> Tensor:
            given = {f"model.{name}": value for name, value in zip(names, values, strict=True)}
            return torch.func.functional_call(Losses(), given, (DOUBLE,))

        assert torch.autograd.gradcheck(losses, parameters)

    def test_steps_equal_those_of_sparse_embeddings(self, table_name: TableName) -> None:
        name = table_name()
        theirs, ours = make(NnTables(torch.arange(NUM_IDS), name)), make(StoreTables(name, {"kind": "sgd", "lr": 0.5}))
        sgd = [
            SparseOptimizer(modules=[ours]),
            *(torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, theirs)),
        ]
        for _ in range(3):
            expected = theirs.losses(BATCH)[0]
            losses = ours.losses(BATCH)[0]
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
            for optimizer in sgd:
                optimizer.zero_grad()
            losses.mean().backward()
            expected.mean().backward()
            for optimizer in sgd:
                optimizer.step()


class TestSides:
    def test_have_their_fields(self) -> None:
        sides = QueryItemSplit(3, ITEMS)
        query, item = sides.query(BATCH), sides.item(BATCH)
        assert query.ids.tolist() == [int(id) for row in range(6) for id in bag_of(BATCH, row, 0)]
        assert item.ids.tolist() == [int(id) for row in range(6) for f in ITEMS for id in bag_of(BATCH, row, f)]
        assert (query.num_fields, item.num_fields) == (1, 2)
        assert query.dense is BATCH.dense
        assert item.dense is None

    def test_of_fields_of_one_id_each_need_no_offsets(self) -> None:
        batch = Batch(torch.arange(6), torch.ones(2), 3)
        chosen = select_fields(batch, [2, 0])
        assert chosen.ids.tolist() == [2, 0, 5, 3]
        assert chosen.offsets is None

    @pytest.mark.parametrize(
        ("items", "message"),
        [
            ((3,), "an item needs some of the 3 fields, got 3"),
            ((), r"items need at least one of the 3 fields and leave at least one for queries, .*, got \[\]"),
            ((0, 1, 2), r"leave at least one for queries, each named once, got \[0, 1, 2\]"),
            ((1, 1), r"each named once, got \[1, 1\]"),
        ],
    )
    def test_that_are_none_are_refused(self, items: Sequence[int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            QueryItemSplit(3, tuple(items))


def bag_of(batch: Batch, row: int, field: int) -> Tensor:
    offsets = batch.offsets_or_ones()
    bag = row * batch.num_fields + field
    return batch.ids[offsets[bag] : offsets[bag + 1]]


class TestRowKeys:
    def test_are_equal_for_equal_features_only(self) -> None:
        _, first, which = first_of_each(row_keys(QueryItemSplit(3, ITEMS).item(BATCH)))
        found = {frozenset((which == each).nonzero().squeeze(1).tolist()) for each in range(len(first))}
        assert found == {frozenset(rows) for rows in SAME_ITEM}
        assert sorted(first.tolist()) == [0, 1, 2, 4]

    def test_are_the_same_in_any_batch_and_with_values_of_one(self) -> None:
        whole = row_keys(BATCH)
        parts = [row_keys(BATCH.rows(row, row + 1)) for row in range(6)]
        assert torch.equal(torch.cat(parts), whole)
        plain = Batch(torch.arange(6), torch.ones(3), 2)
        ones = replace(plain, values=torch.ones(6))
        assert torch.equal(row_keys(plain), row_keys(ones))
        assert torch.equal(row_keys(concatenate([plain, ones]))[:3], row_keys(plain))

    def test_tell_fields_and_dense_features_apart(self) -> None:
        ids = torch.tensor([1, 2, 2, 1, 1, 2])
        dense = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
        assert row_keys(Batch(ids, torch.ones(3), 2, dense=dense)).unique().numel() == 3


class TestItemFrequency:
    def test_finds_the_true_probabilities_of_a_stationary_stream(self) -> None:
        rng = np.random.default_rng(0)
        true = np.repeat([1.0, 0.7, 0.3, 0.1, 0.02], 40)
        frequency, keys = ItemFrequency(), torch.from_numpy(rng.integers(-(2**62), 2**62, size=true.size))
        for _ in range(3000):
            frequency.count(keys[torch.from_numpy(rng.random(true.size) < true)])
        found = frequency.log_probability(keys).exp().numpy()
        assert found[:40].tolist() == [1.0] * 40
        # The mean of gaps that weigh as the last 100 do has a deviation of 7 percent or less.
        np.testing.assert_allclose(found, true, rtol=0.35)
        np.testing.assert_allclose(found.reshape(5, 40).mean(1), true.reshape(5, 40).mean(1), rtol=0.05)

    def test_follows_a_stream_that_changes(self) -> None:
        rng = np.random.default_rng(0)
        frequency, keys = ItemFrequency(), torch.arange(50)
        for probability in (0.1, 0.8):
            for _ in range(2000):
                frequency.count(keys[torch.from_numpy(rng.random(50) < probability)])
        assert frequency.log_probability(keys).exp().mean() == pytest.approx(0.8, rel=0.05)

    def test_is_that_of_the_less_frequent_where_buckets_are_shared(self) -> None:
        # 16 buckets for 12 items: nearly every item shares some of its four buckets.
        frequency, keys = ItemFrequency(bits=4), torch.arange(12)
        alone = ItemFrequency()
        for batch in range(400):
            present = keys[torch.tensor([batch % (item + 1) == 0 for item in range(12)])]
            frequency.count(present)
            alone.count(present)
        shared, expected = frequency.log_probability(keys), alone.log_probability(keys)
        assert (shared >= expected - 1e-4).all()
        assert (shared - expected).mean() < 0.7

    def test_is_kept_in_the_state(self) -> None:
        frequency, again = ItemFrequency(), ItemFrequency()
        for batch in range(5):
            frequency.count(torch.arange(batch, 7))
        again.load_state_dict(frequency.state_dict())
        assert torch.equal(again.log_probability(torch.arange(9)), frequency.log_probability(torch.arange(9)))
