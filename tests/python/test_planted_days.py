"""Planted days of rows: what theory says of them, and a run that follows them for thirty days."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_runs import run_train
from training_runs import train_new

from recstore_ops.training import TrainingConfig, logloss, open_rows, planted_days, write_planted_days
from recstore_ops.training.synthetic.days import FIELDS, FIRST_DAY, IDS_PER_FIELD, _mean_log_odds

pytestmark = pytest.mark.tier("quick")


def test_a_part_of_the_ids_is_new_each_day_and_none_comes_back() -> None:
    seen: list[set[int]] = []
    for day in planted_days(days=5):
        ids_BF = day.rows.ids.view(-1, FIELDS)
        assert [len(set(ids_BF[:, field].tolist())) for field in range(FIELDS)] == [IDS_PER_FIELD] * FIELDS
        seen.append(set(day.rows.ids.tolist()))
        assert len(seen[-1]) == FIELDS * IDS_PER_FIELD
    for number in range(1, 5):
        assert len(seen[number] - seen[number - 1]) == FIELDS * IDS_PER_FIELD // 10
        assert not (seen[number] - seen[number - 1]) & set().union(*seen[:number])


def test_times_lie_in_their_days_in_order() -> None:
    for number, day in enumerate(planted_days(days=3, rows_a_day=100)):
        assert day.rows.times is not None
        seconds = day.rows.times.numpy() / 1e6 - FIRST_DAY
        assert (np.diff(seconds) > 0).all()
        assert set((seconds // 86_400).astype(int)) == {number}


def test_equal_arguments_give_equal_days() -> None:
    one, other, another = (list(planted_days(seed, days=2, rows_a_day=50)) for seed in (0, 0, 1))
    assert all(
        (a.rows.ids == b.rows.ids).all() and (a.logits == b.logits).all() for a, b in zip(one, other, strict=True)
    )
    assert not (one[0].rows.ids == another[0].rows.ids).all()


def test_the_forecast_lies_between_the_truth_and_what_knows_no_new_id() -> None:
    days = list(planted_days(days=20, rows_a_day=20_000))[1:]
    figures = np.array([[logloss(day.rows.labels, each) for each in (day.logits, day.forecast)] for day in days])
    bayes, forecast = figures.mean(0)
    assert bayes + 0.005 < forecast < bayes + 0.03
    # A logit whose error is known to be normal is shrunk: neither more nor less ends better.
    for factor in (0.9, 1.1):
        assert np.mean([logloss(day.rows.labels, factor * day.forecast) for day in days]) > forecast
    assert np.mean([day.bayes_auc - day.forecast_auc for day in days]) > 0.01


def test_without_drift_and_turnover_the_forecast_is_the_truth() -> None:
    first, *days = planted_days(days=3, rows_a_day=500, turnover=0.0, persistence=1.0)
    for day in days:
        np.testing.assert_allclose(day.forecast, day.logits, rtol=1e-9)
    # Before the first day nothing is known.
    assert np.ptp(first.forecast) < 1e-9


def test_mean_log_odds_are_those_of_many_draws() -> None:
    rng = np.random.default_rng(0)
    means, variances = np.array([-2.0, 0.3, 1.0]), np.array([0.0, 0.5, 1.5])
    draws = means[:, None] + np.sqrt(variances)[:, None] * rng.standard_normal((3, 1_000_000))
    probabilities = (1 / (1 + np.exp(-draws))).mean(1)
    np.testing.assert_allclose(_mean_log_odds(means, variances), np.log(probabilities / (1 - probabilities)), atol=4e-3)


def test_days_are_read_from_their_files(tmp_path: Path) -> None:
    days = list(planted_days(days=2, rows_a_day=60))
    paths = write_planted_days(tmp_path, iter(days))
    assert [path.name for path in paths] == ["day01.parquet", "day02.parquet"]
    rows = open_rows(paths[1:], column_roles={"time": "time"})
    (batch,) = rows
    assert rows.field_names == tuple(f"field_{field}" for field in range(FIELDS))
    assert batch.times is not None
    assert days[1].rows.times is not None
    assert batch.times.tolist() == days[1].rows.times.tolist()
    assert batch.labels.tolist() == days[1].rows.labels.tolist()
    assert (batch.ids & ((1 << 40) - 1)).tolist() == days[1].rows.ids.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"days": 0}, "expected at least one day and row, got 0 and 4000"),
        ({"turnover": 1.5}, "expected turnover and persistence from 0 to 1, got 1.5 and 0.985"),
        ({"persistence": -1.0}, "expected turnover and persistence from 0 to 1, got 0.1 and -1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planted_days(**options)


DAYS, LAST = 30, 10
FOLLOW = ("--follow-files", "in", "--follow-every", 0.05, "--follow-until-idle", 0.5, "--column", "time=time")
OPTIONS = ("--model", "lr", "--optimizer", "adagrad", "--lr", 0.3, "--reduction", "sum", "--batch-size", 100)


@pytest.mark.tier("all")
@pytest.mark.embedded_only("a run is saved by a process that keeps its tables itself")
def test_thirty_days_are_predicted_as_by_the_last_week_with_as_many_rows(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    days = list(planted_days(days=DAYS))
    paths = write_planted_days(tmp_path / "in", iter(days))
    living, growing = (
        followed(tmp_path, name, *further)
        for name, further in (("living", ("--ttl-time", "7d", "--eviction-interval", 10)), ("growing", ()))
    )
    weeks = [trained_on(paths[day - 7 : day], paths[day], f"week{day}") for day in range(DAYS - LAST, DAYS)]
    progressive = np.mean([line["validation_auc"] for line in living[-LAST:]])
    assert progressive >= np.mean(weeks) - 0.005
    assert progressive >= np.mean([line["validation_auc"] for line in growing[-LAST:]]) - 0.001
    # No model that has not seen a day ranks it better, but for the luck of its labels.
    assert progressive <= np.mean([day.forecast_auc for day in days[-LAST:]])
    ids = FIELDS * IDS_PER_FIELD
    # At the end of a day's file, which is shuffled, rows are as new as the ends of days: those of the seven before are
    # at most seven days old.
    assert [line["table_rows"] for line in living] == [ids + ids // 10 * min(day, 7) for day in range(DAYS)]
    assert [line["table_rows"] for line in growing] == [ids + ids // 10 * day for day in range(DAYS)]


def followed(folder: Path, name: str, *options: object) -> list[dict[str, Any]]:
    """Follows the files in `in`; returns the evaluations."""
    assert run_train(folder, (*FOLLOW, *OPTIONS, *options, "--run-name", name)) == (0, "")
    lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "evaluation"]


def trained_on(train: list[Path], test: Path, name: str) -> float:
    """Trains a new model in one pass; returns the AUC of a day that it has not seen."""
    config = TrainingConfig(
        train=tuple(train),
        test=(test,),
        model="lr",
        optimizer="adagrad",
        lr=0.3,
        reduction="sum",
        batch_size=100,
        epochs=1,
        validation_fraction=0.0,
        shuffle_window=4000,
    )
    result = train_new(config, name)[-1].test
    assert result is not None
    return result.auc
