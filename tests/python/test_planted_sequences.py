"""Planted histories: the formula, the bound of models that pool, and how far models over them come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from training_runs import Recorder, train_new

from recstore_ops.training import Batch, Evaluation, PlantedSequences, TrainingConfig, auc, planted_sequences
from recstore_ops.training.synthetic.sequences import CLUSTERS, ITEMS_PER_CLUSTER, MAX_HISTORY, true_logits

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]
Known = tuple[NDArray, NDArray]
ROWS = {"train_rows": 2000, "test_rows": 500}


def rows_of(batch: Batch) -> Iterator[tuple[list[int], int]]:
    """The history and the target of each row."""
    bounds = batch.offsets_or_ones().tolist()
    for row in range(len(batch)):
        start, middle, stop = bounds[2 * row : 2 * row + 3]
        assert stop == middle + 1
        yield batch.ids[start:middle].tolist(), int(batch.ids[middle])


class TestRows:
    def test_follow_the_formula(self) -> None:
        test = planted_sequences(3, **ROWS).test
        expected = []
        for history, target in rows_of(test):
            same = sum(item % CLUSTERS == target % CLUSTERS for item in history)
            expected.append(-0.5 + 3.0 * (same - len(history) / CLUSTERS))
        np.testing.assert_allclose(true_logits(test), expected)

    def test_have_histories_of_every_length_and_all_items(self) -> None:
        train = planted_sequences(3, **ROWS).train
        lengths = [len(history) for history, _ in rows_of(train)]
        assert (min(lengths), max(lengths)) == (0, MAX_HISTORY)
        for seen in (train.ids, torch.tensor([target for _, target in rows_of(train)])):
            assert torch.equal(seen.unique(), torch.arange(CLUSTERS * ITEMS_PER_CLUSTER))

    def test_have_labels_of_the_true_probabilities(self) -> None:
        planted = planted_sequences(0)
        logits, labels = true_logits(planted.train), planted.train.labels.numpy()
        probabilities = 1 / (1 + np.exp(-logits))
        for low in np.arange(0, 1, 0.25):
            chosen = (probabilities >= low) & (probabilities < low + 0.25)
            assert abs(labels[chosen].mean() - probabilities[chosen].mean()) < 5 * 0.5 / np.sqrt(chosen.sum())
        assert planted.bayes_auc == auc(planted.test.labels, true_logits(planted.test))

    def test_are_equal_for_equal_seeds_only(self) -> None:
        first, again, other = (planted_sequences(seed, **ROWS) for seed in (3, 3, 4))
        assert torch.equal(first.train.ids, again.train.ids)
        assert torch.equal(first.test.labels, again.test.labels)
        assert not torch.equal(first.train.ids, other.train.ids)

    def test_are_at_least_one_each(self) -> None:
        with pytest.raises(ValueError, match="expected at least one row each, got 0 and 10000"):
            planted_sequences(train_rows=0)


class TestPooledAuc:
    @pytest.mark.parametrize("sums", [1, 4, 5, 9])
    def test_is_near_that_of_any_other_sums(self, drawn: PlantedSequences, known: Known, sums: int) -> None:
        """Random sums and those of K clusters alone, each read by the least squares fit of every cluster's counts."""
        bound = drawn.pooled_auc(sums)
        rng = np.random.default_rng(0)
        for weights in (*rng.standard_normal((5, CLUSTERS, sums)), np.eye(CLUSTERS)[:, :sums]):
            assert auc_of_sums(drawn.test, known, weights) <= bound + 0.015

    def test_grows_to_that_of_the_true_model(self, drawn: PlantedSequences, known: Known) -> None:
        bounds = [drawn.pooled_auc(sums) for sums in range(1, CLUSTERS - 1)]
        assert bounds == sorted(bounds)
        assert bounds[-1] < drawn.bayes_auc
        assert auc_of_sums(drawn.test, known, np.eye(CLUSTERS)) == pytest.approx(drawn.bayes_auc, abs=1e-3)

    @pytest.mark.parametrize("sums", [0, CLUSTERS - 1])
    def test_needs_fewer_sums_than_tell_all(self, sums: int) -> None:
        with pytest.raises(ValueError, match=f"expected from 1 to 10 sums, got {sums}"):
            planted_sequences(**ROWS).pooled_auc(sums)


@pytest.fixture(scope="module")
def drawn() -> PlantedSequences:
    return planted_sequences(0)


@pytest.fixture(scope="module")
def known(drawn: PlantedSequences) -> Known:
    """The test rows' counts by cluster, and the clusters of their targets."""
    counts, targets = np.zeros((len(drawn.test), CLUSTERS)), []
    for row, (history, target) in enumerate(rows_of(drawn.test)):
        np.add.at(counts[row], np.array(history, dtype=int) % CLUSTERS, 1)
        targets.append(target % CLUSTERS)
    return counts, np.array(targets)


def auc_of_sums(batch: Batch, known: Known, weights_CK: NDArray) -> float:
    counts, targets = known
    sums = np.column_stack([counts @ weights_CK, counts.sum(1)])
    wanted = counts - counts.sum(1, keepdims=True) / CLUSTERS
    read = sums @ np.linalg.lstsq(sums, wanted, rcond=None)[0]
    return auc(batch.labels, read[np.arange(len(batch)), targets])


def end_on_sequences(name: str, **options: Any) -> Evaluation:
    """Test figures after the last epoch."""
    defaults: dict[str, Any] = {"dim": 4, "init_std": 0.3, "batch_size": 100, "lr": 1e-2, "validation_fraction": 0}
    defaults["evaluate_every"] = 1_000_000  # The end of the run is evaluated anyway.
    test = train_new(TrainingConfig(planted="sequences", **{**defaults, **options}), name)[-1].test
    assert test is not None
    return test


DIN: dict[str, Any] = {"model": "din", "sequences": (("history", "target"),)}


@pytest.mark.tier("all")
def test_attention_beats_pooling_by_half_of_what_theory_says() -> None:
    planted = planted_sequences(0)
    # Names give initial values, and with them the epoch in which attention begins to tell clusters apart.
    din = end_on_sequences("attention", epochs=5, **DIN)
    deepfm = end_on_sequences("attention", epochs=5, model="deepfm")
    # DeepFM sums 4 factors and a weight of each item.
    assert din.auc - deepfm.auc > (planted.bayes_auc - planted.pooled_auc(5)) / 2
    assert deepfm.auc < planted.pooled_auc(5)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.tier("all")
def test_attention_nears_the_true_model_and_pooling_does_not(seed: int) -> None:
    planted = planted_sequences(seed)
    # Of a fixed name, for the initial values.
    assert end_on_sequences("attention", epochs=10, seed=seed, **DIN).auc > planted.bayes_auc - 0.05
    for model in ("deepfm", "dcn"):
        assert end_on_sequences("attention", epochs=10, seed=seed, model=model).auc < planted.pooled_auc(5)


def test_losses_are_those_of_nn_embedding(table_name: TableName) -> None:
    config = TrainingConfig(
        planted="sequences", planted_train_rows=2000, planted_test_rows=10, epochs=1, log_every=1, **DIN
    )
    name, losses = table_name(), []
    for tables in ("store", "nn"):
        recorder = Recorder()
        train_new(replace(config, tables=tables), name, recorder)
        losses.append([record.loss for record in recorder.steps])
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-5)
    assert losses[0][0] != losses[0][-1]
