"""AUC and logloss against definitions that are too slow to use but obviously right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from recstore_ops.training.metrics.classification import auc, logloss, row_losses

pytestmark = pytest.mark.tier("quick")

# Few distinct scores, so that ties are common.
scored_labels = st.lists(st.tuples(st.integers(0, 1), st.integers(-4, 4)), min_size=2, max_size=40)


def auc_by_all_pairs(labels: list[int], scores: list[float]) -> float:
    positives = [s for y, s in zip(labels, scores, strict=True) if y]
    negatives = [s for y, s in zip(labels, scores, strict=True) if not y]
    won = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return won / (len(positives) * len(negatives))


@given(scored_labels.filter(lambda rows: len({label for label, _ in rows}) == 2))
def test_auc_equals_the_share_of_pairs_in_order(rows: list[tuple[int, int]]) -> None:
    labels, scores = [y for y, _ in rows], [float(s) for _, s in rows]
    assert auc(labels, scores) == pytest.approx(auc_by_all_pairs(labels, scores), abs=1e-15)


def test_auc_of_distinct_random_scores_equals_all_pairs() -> None:
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(2, size=300), rng.standard_normal(300)
    expected = auc_by_all_pairs(labels.tolist(), scores.tolist())
    assert auc(labels, scores) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], 0.0), ([5, 5, 5, 5], 0.5), ([1, 2, 2, 3], 0.875)],
)
def test_auc_of_ordered_reversed_tied_and_half_tied_scores(scores: list[int], expected: float) -> None:
    assert auc([0, 0, 1, 1], scores) == expected


def test_auc_does_not_depend_on_the_order_of_rows() -> None:
    labels, scores = np.array([0, 1, 1, 0, 1]), np.array([0.3, 0.3, 0.9, 0.1, 0.2])
    order = np.array([4, 2, 0, 1, 3])
    assert auc(labels, scores) == auc(labels[order], scores[order])


def test_auc_takes_tensors() -> None:
    assert auc(torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 1.0])) == 1.0


@pytest.mark.parametrize("labels", [[0, 0], [1, 1]])
def test_auc_of_one_class_raises(labels: list[int]) -> None:
    with pytest.raises(ValueError, match="AUC needs labels of both classes"):
        auc(labels, [0.1, 0.2])


@pytest.mark.parametrize("metric", [auc, logloss, row_losses])
@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([], [], "at least one row"),
        ([0, 1], [0.5], r"got \(2,\) and \(1,\)"),
        ([-1, 1], [0.5, 0.5], "labels 0 and 1"),
        ([0, 1], [0.5, math.nan], "score 1 is not finite"),
        ([0, 1], [math.inf, 0.5], "score 0 is not finite"),
    ],
)
def test_bad_input_raises(metric, labels: list, scores: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(labels, scores)


@given(st.lists(st.tuples(st.integers(0, 1), st.floats(-30, 30)), min_size=1, max_size=40))
def test_logloss_equals_the_mean_log_likelihood(rows: list[tuple[int, float]]) -> None:
    # P(y) = sigmoid(+-z); written without 1 - p, which would cancel.
    losses = [math.log1p(math.exp(-z if y else z)) for y, z in rows]
    labels, logits = [y for y, _ in rows], [z for _, z in rows]
    assert logloss(labels, logits) == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_row_losses_are_those_of_torch() -> None:
    labels, logits = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([-2.0, 0.5, -8.0]).double()
    expected = binary_cross_entropy_with_logits(logits, labels.double(), reduction="none")
    assert row_losses(labels, logits) == pytest.approx(expected.numpy(), rel=1e-14)


def test_logloss_equals_that_of_torch() -> None:
    labels, logits = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([-2.0, 0.5, -8.0]).double()
    expected = binary_cross_entropy_with_logits(logits, labels.double()).item()
    assert logloss(labels, logits) == pytest.approx(expected, rel=1e-14)


def test_logloss_of_a_certain_and_wrong_prediction_is_finite() -> None:
    assert logloss([1, 0], [-1e4, 1e4]) == 1e4


def test_logloss_of_one_class_is_defined() -> None:
    assert logloss([1, 1], [0.0, 0.0]) == pytest.approx(math.log(2))
