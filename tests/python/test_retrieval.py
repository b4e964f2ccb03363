"""Evaluation of models that retrieve: candidates, queries, figures against loops over plain lists; their training."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_runs import Recorder, drop_tables, train_new

from recstore_ops.training import (
    Batch,
    Candidates,
    Evaluation,
    EvaluationRecord,
    MemoryRows,
    QueryItemSplit,
    RankedPart,
    StepRecord,
    TrainingConfig,
    TrainingInput,
    best_record,
    build_model,
    evaluate_retrieval,
    open_input,
    table_rows,
    train,
)
from recstore_ops.training.metrics import retrieval

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]
SIDES = QueryItemSplit(2, (1,))
QUERIES, ITEMS = 6, 15


def rows_of(*rows: tuple[int, int, int]) -> Batch:
    """Rows of a query, an item and a label; items are ids from 100."""
    return Batch(
        torch.tensor([id for query, item, _ in rows for id in (query, 100 + item)]),
        torch.tensor([float(label) for *_, label in rows]),
        2,
    )


def drawn(count: int, seed: int = 0) -> list[tuple[int, int, int]]:
    torch.manual_seed(seed)
    columns = torch.randint(QUERIES, (count,)), torch.randint(ITEMS, (count,)), torch.randint(4, (count,))
    return [(q, i, int(label > 0)) for q, i, label in zip(*(column.tolist() for column in columns), strict=True)]


class Table(nn.Module):
    """A retriever whose scores are the elements of a matrix."""

    sides = SIDES
    temperature = 0.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scores = torch.randn(QUERIES, ITEMS)

    def query_vectors(self, batch: Batch) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.scores[SIDES.query(batch).ids]

    def item_vectors(self, batch: Batch) -> Tensor:
        return torch.eye(ITEMS)[SIDES.item(batch).ids - 100]


def figures_by_loop(model: Table, rows: list[tuple[int, int, int]], candidates: set[int]) -> tuple[float, float, float]:
    """Recall@10, NDCG@10 and logloss, query by query."""
    positives: dict[int, Counter[int]] = defaultdict(Counter)
    for query, item, label in rows:
        if label:
            positives[query][item] += 1
    recalls, gains, losses = [], [], []
    for query, items in positives.items():
        scores = {item: float(model.scores[query, item]) / model.temperature for item in candidates}
        ranked = sorted(scores, key=lambda item: -scores[item])[:10]
        recalls.append(len(set(ranked) & set(items)) / len(items))
        largest = sum(1 / math.log2(rank + 2) for rank in range(min(10, len(items))))
        gains.append(sum(1 / math.log2(ranked.index(item) + 2) for item in items if item in ranked) / largest)
        total = math.log(sum(map(math.exp, scores.values())))
        losses += [total - scores[item] for item in items.elements()]
    recall, ndcg, loss = (sum(values) / len(values) for values in (recalls, gains, losses))
    return recall, ndcg, loss


class TestFigures:
    @pytest.mark.parametrize("scores_at_a_time", [1, 30, 1 << 22])
    def test_are_those_of_a_loop_over_queries(self, monkeypatch: pytest.MonkeyPatch, scores_at_a_time: int) -> None:
        monkeypatch.setattr(retrieval, "_SCORES_PER_CHUNK", scores_at_a_time)
        monkeypatch.setattr(retrieval, "_ROWS_PER_CHUNK", 4)
        monkeypatch.setattr(retrieval, "_PENDING_ROWS", 3)
        rows, model = drawn(60), Table()
        blocks = [rows_of(*rows[start : start + 7]) for start in range(0, 60, 7)]
        candidates = Candidates(SIDES, [blocks])
        assert len(candidates) == len({item for _, item, _ in rows})
        found = evaluate_retrieval(model, candidates, RankedPart.of(SIDES, blocks, candidates))
        recall, ndcg, loss = figures_by_loop(model, rows, {item for _, item, _ in rows})
        assert (found.recall, found.ndcg, found.logloss) == pytest.approx((recall, ndcg, loss), rel=1e-5)
        assert (found.rows, found.positives) == (60, sum(label for *_, label in rows))
        assert model.training

    def test_rank_items_of_other_parts_too(self) -> None:
        train_rows, test_rows, model = drawn(40, 1), drawn(8, 2), Table()
        parts = [[rows_of(*train_rows)], [rows_of(*test_rows)]]
        candidates = Candidates(SIDES, parts)
        found = evaluate_retrieval(model, candidates, RankedPart.of(SIDES, parts[1], candidates))
        expected = figures_by_loop(model, test_rows, {item for _, item, _ in train_rows + test_rows})
        assert (found.recall, found.ndcg, found.logloss) == pytest.approx(expected, rel=1e-5)

    def test_of_a_score_that_is_not_finite_are_refused(self) -> None:
        model, blocks = Table(), [rows_of((0, 0, 1), (1, 1, 1))]
        model.scores[1, 0] = math.nan
        candidates = Candidates(SIDES, [blocks])
        with pytest.raises(ValueError, match="the score of query 1 is not finite"):
            evaluate_retrieval(model, candidates, RankedPart.of(SIDES, blocks, candidates))

    def test_need_a_positive_row(self) -> None:
        blocks = [rows_of((0, 0, 0), (1, 1, 0))]
        with pytest.raises(ValueError, match="2 rows to evaluate, none of them positive: there is nothing to retrieve"):
            RankedPart.of(SIDES, blocks, Candidates(SIDES, [blocks]))

    def test_need_candidates_with_every_positive_item(self) -> None:
        candidates = Candidates(SIDES, [[rows_of((0, 0, 1))]])
        with pytest.raises(ValueError, match="rows to evaluate have an item that is not among the candidates"):
            RankedPart.of(SIDES, [rows_of((0, 1, 1))], candidates)

    def test_need_rows(self) -> None:
        with pytest.raises(ValueError, match="no rows to take candidate items from"):
            Candidates(SIDES, [[]])

    def test_take_the_place_of_auc_and_calibration(self) -> None:
        clicks = Evaluation(rows=4, positives=2, auc=0.5, logloss=0.7, calibration=math.nan)
        assert clicks.as_json() == {"rows": 4, "logloss": 0.7, "auc": 0.5, "calibration": None}
        ranking = replace(clicks, auc=math.nan, recall=0.25, ndcg=0.125)
        assert ranking.as_json() == {"rows": 4, "logloss": 0.7, "recall_at_10": 0.25, "ndcg_at_10": 0.125}
        assert not ranking.has_one_class


def pairs(count: int, seed: int = 0) -> Batch:
    """Rows whose item follows from their query, one of four labelled 0."""
    torch.manual_seed(seed)
    query = torch.randint(8, (count,))
    labels = (torch.randint(4, (count,)) > 0).float()
    item = torch.where(labels == 1, query % 4, torch.randint(4, (count,)))
    return Batch(torch.stack([query, 100 + item], 1).reshape(-1), labels, 2)


def input_of(batch: Batch, test: Batch) -> TrainingInput:
    train, tested = (MemoryRows(part, field_names=("query", "item")) for part in (batch, test))
    return TrainingInput(train, None, tested)


def config_of(**options: Any) -> TrainingConfig:
    given = {"batch_size": 20, "epochs": 3, "lr": 0.02, "validation_fraction": 0, "hidden": (), "log_every": 1}
    return TrainingConfig(planted="retrieval", model="two_tower", item_fields=("item",), **{**given, **options})


def trained(name: str, batch: Batch, **options: Any) -> tuple[list[EvaluationRecord], list[StepRecord]]:
    recorder, rows, config = Recorder(), input_of(batch, pairs(40, 1)), config_of(**options)
    try:
        return train(config, build_model(config, name, rows.train), rows, recorder), recorder.steps
    finally:
        drop_tables(name)


@pytest.mark.tier("test")
class TestLoop:
    def test_learns_which_item_belongs_to_a_query(self, table_name: TableName) -> None:
        records, _ = trained(table_name(), pairs(400), epochs=6, lr=0.002)
        tests = [record.test for record in records if record.test is not None]
        assert all(test.recall == 1 and math.isnan(test.auc) for test in tests)
        assert tests[-1].logloss < 0.2 < tests[0].logloss
        assert tests[-1].ndcg is not None
        assert tests[-1].ndcg > 0.95

    def test_takes_the_mean_over_positive_rows(self, table_name: TableName) -> None:
        """Of the model's own losses."""
        name, batch = table_name(), pairs(20)
        options: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "epochs": 1, "shuffle": False}
        _, steps = trained(name, batch, **options)
        model: Any = build_model(config_of(**options), name, input_of(batch, batch).train)
        losses, weights = model.losses(batch)
        drop_tables(name)
        assert weights.sum() < 20
        assert steps[0].loss == pytest.approx((losses.sum() / weights.sum()).item(), rel=1e-6)

    def test_sums_over_positive_rows_where_asked_to(self, table_name: TableName) -> None:
        name, batch = table_name(), pairs(20)
        count = int(batch.labels.sum())
        options: dict[str, Any] = {"optimizer": "sgd", "shuffle": False, "batch_size": 20}
        mean, _ = trained(name, batch, lr=0.01 * count, **options)
        summed, _ = trained(name, batch, lr=0.01, reduction="sum", **options)
        losses = [record.train_loss for record in mean]
        assert losses == pytest.approx([record.train_loss for record in summed], rel=1e-5)
        assert losses[-1] < losses[0]

    def test_gives_queries_without_a_positive_row_no_row(self, table_name: TableName) -> None:
        name, rows = table_name(), rows_of((0, 0, 1), (1, 1, 0), (2, 2, 1))
        model = build_model(config_of(), name, input_of(rows, rows).train)
        train(config_of(epochs=1), model, input_of(rows, rows))
        assert table_rows(model) == 5
        drop_tables(name)

    def test_needs_no_items_without_rows_to_evaluate(self, table_name: TableName) -> None:
        name = table_name()
        rows = replace(input_of(pairs(40), pairs(8)), test=None)
        assert rows.with_candidates(SIDES).candidates is None
        records = train(config_of(epochs=1), build_model(config_of(), name, rows.train), rows)
        drop_tables(name)
        assert (records[0].validation, records[0].test) == (None, None)

    def test_equal_seeds_give_equal_figures(self, table_name: TableName) -> None:
        name = table_name()
        first, _ = trained(name, pairs(100), seed=3)
        again, _ = trained(name, pairs(100), seed=3)
        other, _ = trained(name, pairs(100), seed=4)
        assert [record.test for record in first] == [record.test for record in again]
        assert first[-1].test != other[-1].test

    @pytest.mark.parametrize("changed", [{"popularity_correction": False}, {"temperature": 0.5}, {"vector_dim": 3}])
    def test_every_option_takes_effect(self, table_name: TableName, changed: dict[str, Any]) -> None:
        name = table_name()
        # In batches of 5 an item is not always there, so that there is something to correct.
        plain, _ = trained(name, pairs(50), batch_size=5, epochs=1)
        other, _ = trained(name, pairs(50), batch_size=5, epochs=1, **changed)
        assert plain[-1].test != other[-1].test

    def test_the_curves_of_nn_embedding_are_the_same(self, table_name: TableName) -> None:
        losses, name = [], table_name()
        for tables in ("store", "nn"):
            recorder = Recorder()
            config = TrainingConfig(
                planted="retrieval",
                planted_train_rows=1500,
                planted_test_rows=200,
                model="two_tower",
                item_fields=("item",),
                tables=tables,
                epochs=1,
                log_every=1,
                batch_size=100,
            )
            best = best_record(train_new(config, name, recorder))
            assert best.test is not None
            losses.append([*(record.loss for record in recorder.steps), best.test.logloss, best.test.ndcg])
        assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-5)

    def test_files_of_several_item_fields_train(self, small_files: Path, table_name: TableName) -> None:
        name = table_name()
        config = TrainingConfig(
            train=(small_files / "train.libfm",),
            test=(small_files / "test.libfm",),
            model="two_tower",
            item_fields=("field_1", "field_2"),
            epochs=1,
        )
        rows = open_input(config)
        assert rows.with_candidates(QueryItemSplit(8, (1, 2))).candidates is not None
        test = train_new(config, name)[-1].test
        assert test is not None
        assert test.rows == 500
        assert test.recall is not None
