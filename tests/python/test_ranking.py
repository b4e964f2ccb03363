"""Recall@k and NDCG@k against every order of tied items written out, and what they refuse."""

from __future__ import annotations

import math
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch

from recstore_ops.training import ranking_at

pytestmark = pytest.mark.tier("quick")


def figures_of_order(order: list[int], relevant: set[int], k: int) -> tuple[float, float]:
    hits = [rank for rank, item in enumerate(order[:k], start=1) if item in relevant]
    best = sum(1 / math.log2(rank + 1) for rank in range(1, min(len(relevant), k) + 1))
    return len(hits) / len(relevant), sum(1 / math.log2(rank + 1) for rank in hits) / best


def expected_figures(scores: list[float], relevant: set[int], k: int) -> tuple[float, float]:
    """The mean over all orders of the items that put no lower score before a higher one."""
    orders = [
        list(order)
        for order in permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in pairwise(order))
    ]
    recall, ndcg = zip(*(figures_of_order(order, relevant, k) for order in orders), strict=True)
    return float(np.mean(recall)), float(np.mean(ndcg))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
def test_figures_are_the_means_over_all_orders_of_ties(k: int) -> None:
    rng = np.random.default_rng(k)
    scores = rng.integers(3, size=(20, 5)).astype(np.float32)
    relevant = [set(rng.choice(5, size=rng.integers(4), replace=False).tolist()) for _ in scores]
    expected = [expected_figures(row.tolist(), items, k) for row, items in zip(scores, relevant, strict=True) if items]
    got = ranking_at(k, torch.from_numpy(scores), *as_bags(relevant))
    assert got.queries == len(expected) < 20
    np.testing.assert_allclose((got.recall, got.ndcg), np.mean(expected, axis=0), rtol=1e-12)


def as_bags(relevant: list[set[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0, *map(len, relevant)])
    return torch.tensor([item for items in relevant for item in items]), lengths.cumsum(0)


def test_without_ties_they_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((50, 200))
    relevant = [set(rng.choice(200, size=rng.integers(1, 30), replace=False).tolist()) for _ in scores]
    orders = np.argsort(-scores, axis=1).tolist()
    expected = [figures_of_order(order, items, 10) for order, items in zip(orders, relevant, strict=True)]
    got = ranking_at(10, torch.from_numpy(scores), *as_bags(relevant))
    np.testing.assert_allclose((got.recall, got.ndcg), np.mean(expected, axis=0), rtol=1e-12)


def test_equal_scores_for_all_items_find_what_chance_finds() -> None:
    got = ranking_at(3, torch.zeros(1, 12), torch.tensor([7]), torch.tensor([0, 1]))
    assert got.recall == pytest.approx(3 / 12)
    assert got.ndcg == pytest.approx(sum(1 / math.log2(rank + 1) for rank in (1, 2, 3)) / 12)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"scores": torch.zeros(3)}, r"expected scores \[Q, I\] and offsets \[Q \+ 1\], got \[3\] and \[3\]"),
        ({"scores": torch.zeros(3, 4)}, r"offsets \[Q \+ 1\], got \[3, 4\] and \[3\]"),
        ({"offsets": torch.tensor([0, 2, 1])}, r"expected offsets that rise from 0 to 3, got \[0, 2, 1\]"),
        ({"offsets": torch.tensor([0, 4, 3])}, r"expected offsets that rise from 0 to 3, got \[0, 4, 3\]"),
        ({"relevant": torch.tensor([0, 1, 4])}, "expected relevant items from 0 to before 4, got 0 to 4"),
        ({"relevant": torch.tensor([0, 1, -1])}, "expected relevant items from 0 to before 4, got -1 to 1"),
        ({"relevant": torch.tensor([0, 3, 3])}, "item 3 is more than once among the relevant items of query 1"),
        (
            {"relevant": torch.empty(0, dtype=torch.int64), "offsets": torch.zeros(3, dtype=torch.int64)},
            "expected a query with a relevant item, got none",
        ),
        (
            {"scores": torch.tensor([[0.0] * 4, [0.0, math.nan, 0.0, 0.0]])},
            "the score of query 1 is not finite for an item",
        ),
    ],
)
def test_nonsense_is_refused(changed: dict[str, Any], message: str) -> None:
    given = {
        "k": 2,
        "scores": torch.zeros(2, 4),
        "relevant": torch.tensor([0, 1, 3]),
        "offsets": torch.tensor([0, 1, 3]),
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        ranking_at(given["k"], given["scores"], given["relevant"], given["offsets"])
