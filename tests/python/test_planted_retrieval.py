"""Planted pairs of query and item: the formula, the figures of the true model, and how near two towers come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import train_new

from recstore_ops.training import Evaluation, PlantedRetrieval, TrainingConfig, best_record, planted_retrieval
from recstore_ops.training.synthetic.retrieval import ITEMS, QUERIES

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]
ROWS = {"train_rows": 2000, "test_rows": 500}


@pytest.fixture(scope="module")
def drawn() -> PlantedRetrieval:
    return planted_retrieval(0)


class TestRows:
    def test_have_a_query_and_an_item_each(self) -> None:
        train = planted_retrieval(3, **ROWS).train
        query, item = train.ids.view(-1, 2).T
        assert train.labels.tolist() == [1.0] * 2000
        assert 0 <= int(query.min()) <= int(query.max()) < QUERIES <= int(item.min()) <= int(item.max())
        assert int(item.max()) < QUERIES + ITEMS

    def test_follow_the_probabilities(self, drawn: PlantedRetrieval) -> None:
        p_QI = np.exp(drawn.log_p_QI)
        np.testing.assert_allclose(p_QI.sum(1), 1)
        query, item = drawn.train.ids.view(-1, 2).numpy().T
        expected = p_QI[query].sum(0)
        counts = np.bincount(item - QUERIES, minlength=ITEMS)
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()
        # Within a query too: the mean log-probability of what was chosen is the entropy's negative.
        entropy = -(p_QI * drawn.log_p_QI).sum(1)[query].mean()
        assert -drawn.log_p_QI[query, item - QUERIES].mean() == pytest.approx(entropy, abs=0.03)

    def test_have_few_popular_items(self, drawn: PlantedRetrieval) -> None:
        popularity = np.exp(drawn.log_popularity_I)
        assert popularity.sum() == pytest.approx(1)
        np.testing.assert_allclose(popularity[0] / popularity, (np.arange(ITEMS) + 5) / 5)
        assert popularity[:20].sum() > 0.4

    def test_are_equal_for_equal_seeds_only(self) -> None:
        first, again, other = (planted_retrieval(seed, **ROWS) for seed in (3, 3, 4))
        assert torch.equal(first.train.ids, again.train.ids)
        assert not torch.equal(first.train.ids, other.train.ids)

    def test_are_at_least_one_each(self) -> None:
        with pytest.raises(ValueError, match="expected at least one row each, got 0 and 4000"):
            planted_retrieval(train_rows=0)


class TestBayes:
    def test_ranks_as_a_plain_loop_says(self) -> None:
        planted = planted_retrieval(3, **ROWS)
        query, item = planted.test.ids.view(-1, 2).numpy().T
        there = np.unique(np.concatenate([planted.train.ids.view(-1, 2)[:, 1].numpy(), item])) - QUERIES
        recalls = []
        for each in np.unique(query):
            relevant = set((item[query == each] - QUERIES).tolist())
            best = there[np.argsort(-planted.log_p_QI[each, there])][:10]
            recalls.append(len(relevant & set(best.tolist())) / len(relevant))
        assert planted.bayes().recall == pytest.approx(np.mean(recalls), rel=1e-9)

    def test_is_the_best_of_all_rankings(self, drawn: PlantedRetrieval) -> None:
        bayes, popular = drawn.bayes(), drawn.by_popularity()
        rng = np.random.default_rng(0)
        noisy = drawn.evaluated(drawn.log_p_QI + rng.standard_normal(drawn.log_p_QI.shape))
        fit = drawn.evaluated(drawn.log_p_QI - drawn.log_popularity_I)
        for worse in (popular, noisy, fit):
            assert recall_of(worse) < recall_of(bayes) - 0.03
            assert worse.logloss > bayes.logloss + 0.1


def recall_of(result: Evaluation) -> float:
    assert result.recall is not None
    return result.recall


def end_on_pairs(name: str, **options: Any) -> Evaluation:
    """Test figures of the best evaluation."""
    defaults: dict[str, Any] = {"hidden": (), "batch_size": 250, "lr": 5e-3, "epochs": 6}
    config = TrainingConfig(planted="retrieval", model="two_tower", item_fields=("item",), **{**defaults, **options})
    test = best_record(train_new(config, name)).test
    assert test is not None
    return test


def uncorrected(planted: PlantedRetrieval, batch_size: int) -> Evaluation:
    """Where the loss without correction ends: log p(item | query) - log Q(item), Q the probability of a candidate."""
    log_shares = np.log(np.exp(planted.log_p_QI).mean(0))
    in_batch = -np.expm1(batch_size * np.log1p(-np.exp(log_shares)))
    return planted.evaluated(planted.log_p_QI - np.log(in_batch))


@pytest.mark.tier("all")
def test_two_towers_reach_the_ranking_of_the_true_model(drawn: PlantedRetrieval, table_name: TableName) -> None:
    test, bayes = end_on_pairs(table_name()), drawn.bayes()
    assert recall_of(test) >= 0.95 * recall_of(bayes)
    # 4 columns for each query, 5 for each item: about 2,600 parameters, of 36,000 rows.
    assert bayes.logloss < test.logloss < bayes.logloss + 2600 / 72_000 + 0.05


@pytest.mark.tier("all")
def test_the_correction_gives_the_probabilities_and_its_lack_what_theory_says(
    drawn: PlantedRetrieval, table_name: TableName
) -> None:
    """In small batches popular items are candidates far more often than others."""
    options = {"batch_size": 50, "lr": 2e-3, "epochs": 8}
    corrected = end_on_pairs(table_name(), **options)
    plain = end_on_pairs(table_name(), popularity_correction=False, patience=0, **options)
    theory, bayes = uncorrected(drawn, 50), drawn.bayes()
    assert theory.logloss - bayes.logloss > 0.2
    assert corrected.logloss < bayes.logloss + 0.1
    assert plain.logloss == pytest.approx(theory.logloss, abs=0.1)
    assert recall_of(corrected) > recall_of(plain) + 0.02
