"""Days of rows whose ids come and go and whose effects drift, as for a run that trains on files as they arrive.

Every row has one id of each field, drawn uniformly from the ids that the field has on its day, and a label drawn with
the log-odds

    logit = -0.5 + sum_f w_f

with w_f the effect of the row's id of field f on that day. Effects are normal with deviation 0.5. From day to day an
effect drifts, `w' = r w + sqrt(1 - r^2) 0.5 z` with a fresh normal z, so that its deviation stays. A part of the ids of
each field leaves for good each day, and as many new ones come with effects of their own.

If all effects up to the day before are known, the log-odds are `-0.5 + sum_f r w_f` over the ids that were there, with
a normal error. Its variance is the sum of 0.25 (1 - r^2) for each of these ids and 0.25 for each new one. The mean
probability over that error is the best prediction before the day: `forecast`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.metrics.classification import auc

FIELDS = 6
IDS_PER_FIELD = 100
FIRST_DAY = 1_767_225_600
"""Seconds since 1970 at which the first day begins: 2026-01-01."""

_DAY = 86_400
_BIAS, _EFFECT_STD = -0.5, 0.5
_QUADRATURE_POINTS = 20


@dataclass(frozen=True)
class PlantedDay:
    """The rows of a day, in the order of their times, and the best possible figures for them.

    Attributes:
        rows: with times spread evenly over the day; no two fields share an id.
        logits: float64 [B], the true ones.
        forecast: float64 [B], the log-odds of the best prediction by what was known the day before.
    """

    rows: Batch
    logits: NDArray[np.float64]
    forecast: NDArray[np.float64]

    @property
    def bayes_auc(self) -> float:
        """The AUC of the true logits, the best of any model."""
        return auc(self.rows.labels, self.logits)

    @property
    def forecast_auc(self) -> float:
        """The AUC of the forecast, the best of any model that has not seen the day."""
        return auc(self.rows.labels, self.forecast)


def planted_days(
    seed: int = 0, days: int = 30, rows_a_day: int = 4000, turnover: float = 0.1, persistence: float = 0.985
) -> Iterator[PlantedDay]:
    """Draws days of rows, one after the other; equal arguments give equal rows.

    Args:
        seed: of effects and rows.
        days: how many.
        rows_a_day: rows of each.
        turnover: the part of the ids of each field that new ones replace each day.
        persistence: r, the correlation of an effect with itself a day later.

    Raises:
        ValueError: a number is out of range.
    """
    if days < 1 or rows_a_day < 1:
        raise ValueError(f"expected at least one day and row, got {days} and {rows_a_day}")
    if not 0 <= turnover <= 1 or not 0 <= persistence <= 1:
        raise ValueError(f"expected turnover and persistence from 0 to 1, got {turnover} and {persistence}")
    return _draw_days(np.random.default_rng(seed), days, rows_a_day, turnover, persistence)


def write_planted_days(directory: Path, planted: Iterator[PlantedDay]) -> list[Path]:
    """Writes each day to a file of its own, `day01.parquet` and so on, and returns the files.

    The columns are `label`, `field_0` to `field_5` and `time`, which is a time of UTC.
    """
    paths = []
    for number, day in enumerate(planted, 1):
        ids_BF = day.rows.ids.view(-1, FIELDS).numpy()
        columns = {f"field_{field}": pa.array(ids_BF[:, field]) for field in range(FIELDS)}
        assert day.rows.times is not None
        times = pa.array(day.rows.times.numpy(), pa.timestamp("us", "UTC"))
        labels = pa.array(day.rows.labels.numpy().astype(np.int8))
        paths.append(directory / f"day{number:02}.parquet")
        pq.write_table(pa.table({"label": labels, **columns, "time": times}), paths[-1])
    return paths


def _draw_days(
    rng: np.random.Generator, days: int, rows_a_day: int, turnover: float, persistence: float
) -> Iterator[PlantedDay]:
    shape = FIELDS, IDS_PER_FIELD
    ids_FM = np.arange(FIELDS * IDS_PER_FIELD).reshape(shape)
    effects_FM = _EFFECT_STD * rng.standard_normal(shape)
    expected_FM, variances_FM = np.zeros(shape), np.full(shape, _EFFECT_STD**2)
    replaced = round(turnover * IDS_PER_FIELD)
    for day in range(days):
        if day > 0:
            expected_FM = persistence * effects_FM
            variances_FM = np.full(shape, (1 - persistence**2) * _EFFECT_STD**2)
            effects_FM = expected_FM + np.sqrt(variances_FM) * rng.standard_normal(shape)
            for field in range(FIELDS):
                new = rng.choice(IDS_PER_FIELD, replaced, replace=False)
                ids_FM[field, new] = ids_FM.max() + 1 + np.arange(replaced)
                effects_FM[field, new] = _EFFECT_STD * rng.standard_normal(replaced)
                expected_FM[field, new], variances_FM[field, new] = 0.0, _EFFECT_STD**2
        places_BF = rng.integers(IDS_PER_FIELD, size=(rows_a_day, FIELDS))
        logits, means, variances = (_of_rows(each, places_BF) for each in (effects_FM, expected_FM, variances_FM))
        yield PlantedDay(
            rows=_batch(rng, ids_FM, places_BF, _BIAS + logits, day),
            logits=_BIAS + logits,
            forecast=_mean_log_odds(_BIAS + means, variances),
        )


def _of_rows(values_FM: NDArray, places_BF: NDArray) -> NDArray:
    """Sums the values of a row's ids: [B]."""
    return values_FM[np.arange(FIELDS), places_BF].sum(1)


def _batch(rng: np.random.Generator, ids_FM: NDArray, places_BF: NDArray, logits_B: NDArray, day: int) -> Batch:
    labels_B = rng.random(len(logits_B)) < 1 / (1 + np.exp(-logits_B))
    seconds_B = FIRST_DAY + day * _DAY + np.arange(len(logits_B)) * (_DAY / len(logits_B))
    return Batch(
        ids=torch.from_numpy(ids_FM[np.arange(FIELDS), places_BF].reshape(-1)),
        labels=torch.from_numpy(labels_B.astype(np.float32)),
        num_fields=FIELDS,
        times=torch.from_numpy((seconds_B * 1e6).astype(np.int64)),
    )


def _mean_log_odds(means_B: NDArray, variances_B: NDArray) -> NDArray:
    """The log-odds of the mean probability for normal log-odds, by Gauss-Hermite quadrature."""
    points, weights = np.polynomial.hermite.hermgauss(_QUADRATURE_POINTS)
    logits = means_B[:, None] + np.sqrt(2 * variances_B)[:, None] * points
    mean_B = (1 / (1 + np.exp(-logits))) @ weights / np.sqrt(np.pi)
    return np.log(mean_B / (1 - mean_B))
