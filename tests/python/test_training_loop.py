"""The training loop: what it trains on, when it evaluates, records and stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optimizer_kinds import KINDS
from training_runs import Recorder, train_new

from recstore_ops.training import (
    Evaluation,
    EvaluationRecord,
    TrainingConfig,
    best_record,
    build_model,
    open_input,
    table_rows,
    train,
)
from recstore_ops.training.run.stopping import EarlyStopping

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]
MODELS = ["lr", "fm", "deepfm", "dlrm", "wide_deep", "dcn"]


def config_of(small_files: Path, **options: Any) -> TrainingConfig:
    options = {"epochs": 2, "validation_fraction": 0, **options}
    return TrainingConfig(train=(small_files / "train.libfm",), test=(small_files / "test.libfm",), **options)


def figures(config: TrainingConfig, name: str) -> list[tuple[float, Evaluation | None]]:
    return [(record.train_loss, record.test) for record in train_new(config, name)]


def test_the_last_partial_batch_is_trained_on(small_files: Path, table_name: TableName) -> None:
    records = train_new(config_of(small_files, batch_size=100), table_name())
    assert [record.train_rows for record in records] == [1003, 1003]


@pytest.mark.parametrize("model", MODELS)
def test_equal_seeds_give_equal_figures(small_files: Path, table_name: TableName, model: str) -> None:
    options: dict[str, Any] = {"model": model}
    if model in ("deepfm", "dlrm", "wide_deep", "dcn"):
        options["dropout"] = 0.2
    name = table_name()
    first = figures(config_of(small_files, seed=3, **options), name)
    assert first == figures(config_of(small_files, seed=3, **options), name)
    assert first != figures(config_of(small_files, seed=4, **options), name)


def test_rows_that_do_not_fit_the_cache_give_equal_figures(small_files: Path, table_name: TableName) -> None:
    cached = config_of(small_files, validation_fraction=0.2)
    streamed = config_of(small_files, validation_fraction=0.2, cache_bytes=0)
    name = table_name()
    assert figures(cached, name) == figures(streamed, name)


def test_validation_rows_are_not_trained_on(small_files: Path, table_name: TableName) -> None:
    record = train_new(config_of(small_files, validation_fraction=0.2), table_name())[0]
    assert record.validation is not None
    assert record.validation.rows > 100
    assert record.train_rows + record.validation.rows == 1003


def test_summed_gradients_are_batch_size_times_the_mean(small_files: Path, table_name: TableName) -> None:
    # All rows in one batch: a partial one would have another factor.
    name = table_name()
    options = {"optimizer": "sgd", "batch_size": 1003, "epochs": 3, "shuffle": False}
    mean = config_of(small_files, reduction="mean", lr=0.1003, **options)
    summed = config_of(small_files, reduction="sum", lr=0.0001, **options)
    losses = [record.train_loss for record in train_new(mean, name)]
    summed_losses = [record.train_loss for record in train_new(summed, name)]
    assert losses == pytest.approx(summed_losses, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", KINDS)
def test_every_optimizer_lowers_the_loss(small_files: Path, table_name: TableName, optimizer: str) -> None:
    losses = [
        record.train_loss
        for record in train_new(config_of(small_files, optimizer=optimizer, epochs=4, batch_size=50), table_name())
    ]
    assert losses[-1] < losses[0] - 0.005


@pytest.mark.parametrize("model", MODELS)
def test_every_model_lowers_the_loss(small_files: Path, table_name: TableName, model: str) -> None:
    config = config_of(small_files, model=model, epochs=4, batch_size=50, lr=0.01)
    losses = [record.train_loss for record in train_new(config, table_name())]
    assert losses[-1] < losses[0] - 0.005


def test_another_dense_optimizer_changes_the_dense_part(small_files: Path, table_name: TableName) -> None:
    name = table_name()
    plain = figures(config_of(small_files, model="deepfm"), name)
    other = figures(
        config_of(small_files, model="deepfm", dense_optimizer="sgd", dense_lr=0.5, dense_options={"momentum": 0.9}),
        name,
    )
    assert plain[0][0] != other[0][0]


@pytest.mark.parametrize("tables", ["store", "nn"])
def test_the_schedule_moves_both_learning_rates(small_files: Path, table_name: TableName, tables: str) -> None:
    recorder = Recorder()
    config = config_of(
        small_files, tables=tables, schedule="linear", warmup_steps=2, batch_size=250, log_every=1, lr=0.08
    )
    train_new(config, table_name(), recorder)
    rates = [record.lr for record in recorder.steps]
    # Five steps an epoch; the estimate of the rows is exact because they were read as a whole for the cache.
    assert rates[0] == pytest.approx(0.04)
    assert rates[1] == pytest.approx(0.08 * (1 - 250 / 1003 / 2), rel=0.05)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[5] == pytest.approx(0.04)
    assert rates[-1] == pytest.approx(0.08 * (1 - 2003 / 2006), rel=0.01)


def test_a_schedule_changes_what_is_learnt(small_files: Path, table_name: TableName) -> None:
    name = table_name()
    constant = figures(config_of(small_files), name)
    assert constant != figures(config_of(small_files, schedule="cosine"), name)


def test_evaluations_within_epochs(small_files: Path, table_name: TableName) -> None:
    config = config_of(small_files, batch_size=100, evaluate_every=4)
    records = train_new(config, table_name())
    # Eleven steps an epoch; the end of the first is not told apart, that of the run is.
    assert [record.step for record in records] == [4, 8, 12, 16, 20, 22]
    assert [record.number for record in records] == list(range(1, 7))
    assert [record.train_rows for record in records] == [400, 400, 303, 400, 400, 103]
    assert [record.epoch for record in records] == pytest.approx([0.4, 0.8, 1.1, 1.5, 1.9, 2.0], abs=0.01)


def test_an_evaluation_at_the_end_of_the_run_is_not_repeated(small_files: Path, table_name: TableName) -> None:
    records = train_new(config_of(small_files, batch_size=100, evaluate_every=11), table_name())
    assert [record.step for record in records] == [11, 22]


def test_step_records_cover_all_rows(small_files: Path, table_name: TableName) -> None:
    recorder = Recorder()
    records = train_new(config_of(small_files, batch_size=100, log_every=4), table_name(), recorder)
    assert [record.step for record in recorder.steps] == [4, 8, 11, 12, 16, 20, 22]
    assert [record.rows for record in recorder.steps] == [400, 800, 1003, 1103, 1503, 1903, 2006]
    first = recorder.steps[:3]
    mean = sum(record.loss * rows for record, rows in zip(first, (400, 400, 203), strict=True)) / 1003
    assert mean == pytest.approx(records[0].train_loss)
    assert recorder.steps[-1].table_rows == records[-1].table_rows == 800
    assert recorder.steps[-1].table_bytes > 800 * 9 * 4
    assert recorder.steps[-1].process_bytes > 2**20


def test_the_observer_sees_every_batch_and_the_scores(small_files: Path, table_name: TableName) -> None:
    recorder = Recorder()
    train_new(config_of(small_files, batch_size=500, validation_fraction=0.2), table_name(), recorder)
    assert [epoch for epoch, *_ in recorder.batches] == [1, 1, 2, 2]
    assert all(set(scores) == {"validation", "test"} for scores in recorder.scores)
    assert len(recorder.scores[0]["test"]) == 500


def test_segments_are_of_the_named_field(small_files: Path, table_name: TableName) -> None:
    recorder = Recorder()
    config = config_of(small_files, auc_by="field_2")
    train_new(config, table_name(), recorder)
    segments = recorder.scores[0]["test"].segments
    assert segments is not None
    assert all(100 <= id < 150 for id in segments.tolist())


def test_segments_of_an_unknown_field_are_refused(small_files: Path, table_name: TableName) -> None:
    with pytest.raises(ValueError, match=r"auc_by must name a field, one of field_0, .*; got 'user'"):
        train_new(config_of(small_files, auc_by="user"), table_name())


def test_tables_with_rows_are_refused(small_files: Path, table_name: TableName) -> None:
    name = table_name()
    config = config_of(small_files)
    rows = open_input(config)
    model = build_model(config, name, rows.train)
    train(config, model, rows)
    num_rows = table_rows(model)
    assert num_rows > 0
    with pytest.raises(ValueError, match=f"have {num_rows} rows already"):
        build_model(config, name, rows.train)


def test_a_diverging_run_stops_with_advice(small_files: Path, table_name: TableName) -> None:
    config = config_of(small_files, optimizer="sgd", lr=1e6, reduction="sum", epochs=20, batch_size=10)
    with pytest.raises(ValueError, match="lower the learning rate"):
        train_new(config, table_name())


@pytest.mark.parametrize(
    ("rows", "fraction", "seed", "message"),
    [
        (1, 0.01, 0, "no rows to evaluate: validation_fraction 0.01 holds none out of 1 rows; 0 trains without"),
        (3, 0.01, 0, "no rows to evaluate: validation_fraction 0.01 holds none out of 3 rows; 0 trains without"),
        (1, 0.5, 2, "no training rows are left: validation_fraction 0.5 holds out all of 1 rows; 0 holds none"),
    ],
)
def test_rows_that_leave_a_part_empty_surface_before_training(
    tmp_path: Path, table_name: TableName, rows: int, fraction: float, seed: int, message: str
) -> None:
    (tmp_path / "few").write_text("1 3:1\n" * rows)
    config = TrainingConfig(train=(tmp_path / "few",), validation_fraction=fraction, seed=seed)
    recorder = Recorder()
    with pytest.raises(ValueError, match=f"^{message}$"):
        train_new(config, table_name(), recorder)
    assert recorder.batches == []


def test_a_bad_test_line_surfaces_before_training(small_files: Path, table_name: TableName) -> None:
    with open(small_files / "test.libfm", "a") as file:
        file.write("bad\n")
    recorder = Recorder()
    with pytest.raises(ValueError, match=r"test\.libfm:501: expected"):
        train_new(config_of(small_files), table_name(), recorder)
    assert recorder.batches == []


def test_stops_after_patience_evaluations_without_improvement() -> None:
    stopping = EarlyStopping(patience=2)
    assert [stopping.should_stop(x) for x in (0.5, 0.4, 0.41, 0.39, 0.4, 0.39)] == ([False] * 5 + [True])


def test_zero_patience_never_stops() -> None:
    stopping = EarlyStopping(patience=0)
    assert not any(stopping.should_stop(x) for x in (0.1, 0.2, 0.3, 0.4))


def test_early_stopping_ends_a_run_in_the_midst_of_an_epoch(
    small_files: Path, table_name: TableName, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small_files, validation_fraction=0.3, evaluate_every=2, batch_size=100)
    monkeypatch.setattr(EarlyStopping, "should_stop", lambda stopping, logloss: True)
    assert [record.step for record in train_new(config, table_name())] == [2]


def record(number: int, logloss: float | None) -> EvaluationRecord:
    validation = None if logloss is None else Evaluation(10, 5, 0.5, logloss, 1.0)
    return EvaluationRecord(number, float(number), number, 100, 0.5, 100, 1.0, validation, None, 5)


def test_best_record_has_the_lowest_validation_logloss() -> None:
    records = [record(n, loss) for n, loss in enumerate((0.5, 0.3, 0.4), start=1)]
    assert best_record(records).number == 2


def test_best_record_of_files_that_were_followed_is_the_last() -> None:
    records = [replace(record(n, 0.1 * n), file=f"day{n}") for n in (1, 2, 3)]
    assert best_record(records).number == 3


def test_best_record_without_validation_is_the_last() -> None:
    assert best_record([record(n, None) for n in (1, 2, 3)]).number == 3
