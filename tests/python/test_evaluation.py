"""Scores, and what is computed from them: figures, calibration bins and figures by segment."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from recstore_ops import DistEmbedding, table_statistics
from recstore_ops.training.data.batch import NO_GROUP, Batch
from recstore_ops.training.metrics.calibration import calibration_bins, wilson_interval
from recstore_ops.training.metrics.classification import auc, logloss
from recstore_ops.training.metrics.evaluation import Evaluation, Scores, evaluate, predict
from recstore_ops.training.metrics.retrieval import ranking_at
from recstore_ops.training.metrics.segments import segment_figures, write_segments

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]

# Few distinct logits and segments, so that ties and segments of one class are common.
LABELLED = st.tuples(st.integers(0, 1), st.integers(-3, 3))
IN_SEGMENTS = st.tuples(st.integers(0, 1), st.integers(-3, 3), st.integers(-2, 2), st.booleans())


def scores_of(labels: list[int], logits: list[float]) -> Scores:
    return Scores(torch.tensor(labels, dtype=torch.float32), torch.tensor(logits, dtype=torch.float32))


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


class FirstId(nn.Module):
    """A model whose logits are the first id of each row, as a number."""

    def forward(self, batch: Batch) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return batch.ids[batch.offsets_or_ones()[: -1 : batch.num_fields]].float()


class TestPredict:
    def batches(self) -> list[Batch]:
        whole = Batch(
            ids=torch.tensor([1, 10, 2, 20, 21, -3, 30]),
            labels=torch.tensor([1.0, 0.0, 1.0]),
            num_fields=3,
            # The last field of the second row has no id, the middle one of the first neither.
            offsets=torch.tensor([0, 1, 1, 2, 3, 5, 5, 6, 6, 7]),
        )
        return [whole.rows(0, 2), whole.rows(2, 3)]

    def test_scores_are_in_the_order_of_the_rows(self) -> None:
        scores = predict(FirstId(), self.batches())
        assert scores.labels.tolist() == [1, 0, 1]
        assert scores.logits.tolist() == [1, 2, -3]
        assert scores.segments is None
        assert scores.in_segment is None

    def test_segments_are_the_ids_of_one_field(self) -> None:
        scores = predict(FirstId(), self.batches(), segment_field=2)
        assert scores.segments is not None
        assert scores.in_segment is not None
        assert scores.in_segment.tolist() == [True, False, True]
        assert scores.segments[scores.in_segment].tolist() == [10, 30]

    def test_segments_of_rows_with_one_id_in_every_field(self) -> None:
        batch = Batch(torch.tensor([1, 7, 2, 8]), torch.tensor([0.0, 1.0]), num_fields=2)
        scores = predict(FirstId(), [batch], segment_field=1)
        assert scores.segments is not None
        assert scores.segments.tolist() == [7, 8]

    def test_a_field_of_several_ids_makes_no_segments(self) -> None:
        with pytest.raises(ValueError, match="a row has 2 ids in field 1; segments take a field of one id a row"):
            predict(FirstId(), self.batches(), segment_field=1)

    @pytest.mark.parametrize("field", [-1, 3])
    def test_a_field_that_is_not_there_is_an_error(self, field: int) -> None:
        with pytest.raises(ValueError, match=f"no field {field}: the rows have 3"):
            predict(FirstId(), self.batches(), segment_field=field)

    @pytest.mark.parametrize("was_training", [True, False])
    def test_the_mode_of_the_model_is_restored_also_after_an_error(self, was_training: bool) -> None:
        model = FirstId().train(was_training)
        predict(model, self.batches())
        assert model.training is was_training
        with pytest.raises(ValueError, match="no field"):
            predict(model, self.batches(), segment_field=9)
        assert model.training is was_training

    def test_unknown_ids_get_no_row(self, table_name: TableName) -> None:
        class Sum(nn.Module):
            def __init__(self, name: str) -> None:
                super().__init__()
                self.table = DistEmbedding(None, 1, name)

            def forward(self, batch: Batch) -> Tensor:
                return self.table(batch.ids).view(len(batch), -1).sum(1)

        name = table_name()
        model = Sum(name)
        evaluate(model, [Batch(torch.arange(100), torch.ones(100))])
        assert table_statistics(name)["rows"] == 0

    def test_no_rows_give_no_figures(self) -> None:
        scores = predict(FirstId(), [])
        assert len(scores) == 0
        with pytest.raises(ValueError, match="no rows to evaluate"):
            Evaluation.of(scores)


class TestEvaluation:
    def test_figures_of_four_rows(self) -> None:
        labels, logits = [0, 1, 0, 1], [-1.0, 0.0, 0.5, 2.0]
        result = Evaluation.of(scores_of(labels, logits))
        assert (result.rows, result.positives) == (4, 2)
        assert result.auc == auc(labels, logits) == 0.75
        assert result.logloss == logloss(labels, logits)
        assert result.calibration == pytest.approx(sum(sigmoid(z) for z in logits) / 2)

    def test_calibration_is_1_where_predictions_are_the_share_of_positives(self) -> None:
        result = Evaluation.of(scores_of([1, 0, 0, 0], [math.log(1 / 3)] * 4))
        assert result.calibration == pytest.approx(1, rel=1e-7)

    def test_positives_only_have_no_auc(self) -> None:
        result = Evaluation.of(scores_of([1, 1], [0.0, 0.0]))
        assert result.has_one_class
        assert result.as_json() == {"rows": 2, "logloss": pytest.approx(math.log(2)), "auc": None, "calibration": 0.5}

    def test_negatives_only_have_no_auc_and_no_calibration(self) -> None:
        result = Evaluation.of(scores_of([0, 0], [0.0, 0.0]))
        assert math.isnan(result.calibration)
        assert result.as_json() == {"rows": 2, "logloss": pytest.approx(math.log(2)), "auc": None, "calibration": None}

    def test_logits_that_are_not_finite_are_refused(self) -> None:
        with pytest.raises(ValueError, match="score 1 is not finite"):
            Evaluation.of(scores_of([0, 1], [0.0, math.nan]))


class TestCalibrationBins:
    @given(st.lists(LABELLED, min_size=1, max_size=60), st.integers(1, 25))
    def test_equal_predictions_share_a_bin_and_nothing_is_lost(self, rows: list[tuple[int, int]], bins: int) -> None:
        labels, logits = [y for y, _ in rows], [float(z) for _, z in rows]
        result = calibration_bins(scores_of(labels, logits), bins)
        # With each prediction whole in one bin, bins are stretches of the sorted distinct predictions.
        distinct = sorted(set(logits))
        start = 0
        for size, predicted, observed in zip(result.rows, result.predicted, result.observed, strict=True):
            stop = start + 1
            while sum(logits.count(z) for z in distinct[start:stop]) < size:
                stop += 1
            inside = [(y, z) for y, z in zip(labels, logits, strict=True) if z in distinct[start:stop]]
            assert len(inside) == size
            assert observed == pytest.approx(sum(y for y, _ in inside) / size)
            assert predicted == pytest.approx(sum(sigmoid(z) for _, z in inside) / size)
            start = stop
        assert start == len(distinct)
        assert len(result.rows) <= bins

    @given(st.integers(1, 200), st.integers(1, 30))
    def test_bins_of_distinct_predictions_differ_by_a_row_at_most(self, rows: int, bins: int) -> None:
        result = calibration_bins(scores_of([0] * rows, [z / 10 for z in range(rows)]), bins)
        assert len(result.rows) == min(rows, bins)
        assert result.rows.max() - result.rows.min() <= 1
        assert (np.diff(result.predicted) > 0).all()

    def test_one_prediction_is_one_bin(self) -> None:
        result = calibration_bins(scores_of([0, 1, 0, 0], [0.0] * 4))
        assert (result.rows.tolist(), result.predicted.tolist(), result.observed.tolist()) == ([4], [0.5], [0.25])
        assert result.expected_calibration_error() == 0.25

    def test_the_error_is_weighted_by_rows(self) -> None:
        result = calibration_bins(scores_of([1, 1, 1, 0], [0.0, 0.0, 0.0, 30.0]), 4)
        assert result.expected_calibration_error() == pytest.approx((3 * 0.5 + 1) / 4)

    def test_no_rows_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="no rows to bin"):
            calibration_bins(scores_of([], []))

    def test_the_interval_of_40_in_100(self) -> None:
        low, high = wilson_interval(np.array([40]), np.array([100]))
        assert low[0] == pytest.approx(0.30940, abs=1e-5)
        assert high[0] == pytest.approx(0.49800, abs=1e-5)

    @given(st.integers(1, 10**9).flatmap(lambda rows: st.tuples(st.integers(0, rows), st.just(rows))))
    def test_the_interval_solves_the_score_test(self, counts: tuple[int, int]) -> None:
        positives, rows = counts
        low, high = wilson_interval(np.array([positives]), np.array([rows]))
        share = positives / rows
        assert 0 <= low[0] <= share <= high[0] <= 1
        for bound in (float(low[0]), float(high[0])):
            if 0 < bound < 1 and abs(bound - share) > 1e-6:
                z = (share - bound) / math.sqrt(bound * (1 - bound) / rows)
                assert abs(z) == pytest.approx(1.959964, rel=1e-4)


class TestSegments:
    def scores(self, rows: list[tuple[int, int, int, bool]]) -> Scores:
        labels, logits, segments, inside = (list(column) for column in zip(*rows, strict=True)) if rows else ([],) * 4
        return Scores(
            torch.tensor(labels, dtype=torch.float32),
            torch.tensor(logits, dtype=torch.float32),
            torch.tensor(segments, dtype=torch.int64) * 2**61,
            torch.tensor(inside, dtype=torch.bool),
        )

    @given(st.lists(IN_SEGMENTS, min_size=1, max_size=60))
    def test_figures_equal_those_of_each_segment_alone(self, rows: list[tuple[int, int, int, bool]]) -> None:
        figures = segment_figures(self.scores(rows))
        expected_ids = {segment for _, _, segment, inside in rows if inside}
        assert sorted(figures.ids.tolist()) == sorted(segment * 2**61 for segment in expected_ids)
        assert figures.rows.tolist() == sorted(figures.rows.tolist(), reverse=True)
        for place, segment in enumerate(figures.ids.tolist()):
            own = [(y, z) for y, z, other, inside in rows if inside and other * 2**61 == segment]
            alone = Evaluation.of(scores_of([y for y, _ in own], [float(z) for _, z in own]))
            assert (figures.rows[place], figures.positives[place]) == (alone.rows, alone.positives)
            assert figures.auc[place] == pytest.approx(alone.auc, abs=0, nan_ok=True)
            assert figures.logloss[place] == pytest.approx(alone.logloss, rel=1e-12)
            assert figures.calibration[place] == pytest.approx(alone.calibration, rel=1e-12, nan_ok=True)
            share = alone.calibration * alone.positives / alone.rows if alone.positives else figures.prediction[place]
            assert figures.prediction[place] == pytest.approx(share, rel=1e-12)
            assert 0 < figures.prediction[place] < 1

    @given(st.lists(IN_SEGMENTS, min_size=1, max_size=60))
    def test_recall_and_ndcg_are_those_of_each_segments_rows_as_items(
        self, rows: list[tuple[int, int, int, bool]]
    ) -> None:
        figures = segment_figures(self.scores(rows))
        means = []
        for place, segment in enumerate(figures.ids.tolist()):
            own = [(y, z) for y, z, other, inside in rows if inside and other * 2**61 == segment]
            relevant = torch.tensor([item for item, (y, _) in enumerate(own) if y == 1], dtype=torch.int64)
            if len(relevant) == 0:
                assert np.isnan(figures.ndcg[place])
                assert np.isnan(figures.recall[place])
                continue
            logits = torch.tensor([[z for _, z in own]], dtype=torch.float64)
            expected = ranking_at(10, logits, relevant, torch.tensor([0, len(relevant)]))
            assert figures.recall[place] == pytest.approx(expected.recall, rel=1e-12)
            assert figures.ndcg[place] == pytest.approx(expected.ndcg, rel=1e-12)
            means.append((expected.recall, expected.ndcg))
        expected_means = np.mean(means, axis=0) if means else (math.nan, math.nan)
        assert figures.mean_ranking() == pytest.approx(tuple(expected_means), nan_ok=True)

    def test_orders_of_segments(self) -> None:
        rows = [
            *[(1, 3, 1, True)] * 4,
            *[(0, 2, 2, True), (1, -2, 2, True), (0, -1, 2, True)],
            *[(1, -1, 3, True), (0, -4, 3, True)],
            *[(0, 9, 0, True)],
        ]
        figures = segment_figures(self.scores(rows))
        orders = {order: figures.ordered(order).ids // 2**61 for order in ("rows", "logloss", "auc", "error")}
        assert {order: ids.tolist() for order, ids in orders.items()} == {
            "rows": [1, 2, 3, 0],
            "logloss": [0, 2, 3, 1],
            # Those of one class come last, in the order that they had.
            "auc": [2, 3, 1, 0],
            "error": [0, 3, 2, 1],
        }

    def test_segments_are_called_by_their_texts(self, tmp_path: Path) -> None:
        scores = replace(self.scores([(0, 0, 1, True), (1, 2, -1, True)]), segments=torch.tensor([5, 6]))
        figures = segment_figures(scores.with_texts({6: "é, b", 7: "other"}))
        assert (figures.names(), figures.names(1), figures.texts) == (["5", "é, b"], ["5"], {6: "é, b"})
        write_segments(tmp_path / "segments.csv", {"test": figures})
        with open(tmp_path / "segments.csv", newline="", encoding="utf-8") as file:
            assert [line["segment"] for line in csv.DictReader(file)] == ["5", "é, b"]

    def test_scores_without_segments_have_no_texts(self) -> None:
        assert scores_of([0, 1], [0.0, 1.0]).with_texts({1: "a"}).texts is None

    def test_groups_of_rows_are_segments_unless_a_field_is_asked_for(self) -> None:
        batch = Batch(torch.tensor([7, 8]), torch.tensor([0.0, 1.0]), groups=torch.tensor([3, NO_GROUP]))
        by_group, by_field = predict(FirstId(), [batch]), predict(FirstId(), [batch], segment_field=0)
        assert by_group.segments is not None
        assert by_group.in_segment is not None
        assert (by_group.segments.tolist(), by_group.in_segment.tolist()) == ([3, NO_GROUP], [True, False])
        assert by_field.segments is not None
        assert by_field.segments.tolist() == [7, 8]

    @given(st.lists(IN_SEGMENTS, min_size=1, max_size=60))
    def test_the_weighted_auc_is_the_mean_over_rows_in_segments_of_both_classes(
        self, rows: list[tuple[int, int, int, bool]]
    ) -> None:
        figures = segment_figures(self.scores(rows))
        sums, counted = 0.0, 0
        for segment in {segment for _, _, segment, _ in rows}:
            labels = [y for y, _, other, inside in rows if inside and other == segment]
            logits = [z for _, z, other, inside in rows if inside and other == segment]
            if len(set(labels)) == 2:
                sums, counted = sums + len(labels) * auc(labels, logits), counted + len(labels)
        assert figures.weighted_auc_rows() == counted
        assert figures.weighted_auc() == pytest.approx(sums / counted if counted else math.nan, nan_ok=True)

    def test_knowing_who_clicks_gains_nothing(self) -> None:
        rows = [(1, 3, 1, True), (1, 3, 1, True), (0, 3, 1, True), (1, -3, 2, True), (0, -3, 2, True), (0, -3, 2, True)]
        scores = self.scores(rows)
        assert Evaluation.of(scores).auc > 0.6
        assert segment_figures(scores).weighted_auc() == 0.5

    def test_a_hundred_thousand_segments(self) -> None:
        rng = np.random.default_rng(0)
        count = 400_000
        scores = Scores(
            torch.from_numpy(rng.integers(2, size=count).astype(np.float32)),
            torch.from_numpy(rng.normal(size=count).astype(np.float32)),
            torch.from_numpy(rng.integers(100_000, size=count)),
            torch.ones(count, dtype=torch.bool),
        )
        figures = segment_figures(scores)
        assert figures.rows.sum() == count
        assert figures.weighted_auc() == pytest.approx(0.5, abs=0.005)

    def test_no_row_in_a_segment(self) -> None:
        figures = segment_figures(self.scores([(1, 0, 5, False)]))
        assert len(figures.ids) == 0
        assert math.isnan(figures.weighted_auc())
        assert figures.weighted_auc_rows() == 0

    def test_scores_without_segments_are_refused(self) -> None:
        with pytest.raises(ValueError, match="these scores have no segments"):
            segment_figures(scores_of([0, 1], [0.0, 1.0]))

    def test_the_file_has_the_largest_first_and_undefined_figures_empty(self, tmp_path: Path) -> None:
        rows = [(0, 0, 1, True), (1, 2, 3, True), (0, -2, 3, True), (0, 1, -1, True)]
        path = tmp_path / "segments.csv"
        write_segments(path, {"test": segment_figures(self.scores(rows))})
        with open(path, newline="") as file:
            lines = list(csv.DictReader(file))
        assert [int(line["segment"]) // 2**61 for line in lines] == [3, -1, 1]
        assert [line["rows"] for line in lines] == ["2", "1", "1"]
        assert [line["auc"] for line in lines] == ["1.0", "", ""]
        assert lines[1]["calibration"] == ""
        assert float(lines[2]["logloss"]) == pytest.approx(math.log(2))
        assert {line["part"] for line in lines} == {"test"}
