"""How good a model is on each id of one field, on each user for example."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recstore_ops.training.quality.evaluation import Scores
from recstore_ops.training.quality.metrics import row_losses


@dataclass(frozen=True)
class SegmentFigures:
    """Figures of S segments, those with most rows first, among equals by id.

    Attributes:
        ids, rows, positives: int64 [S].
        auc: float64 [S], nan where a segment has one class only.
        logloss: float64 [S], in nats.
        calibration: float64 [S], mean predicted probability divided by the share of positives; nan without positives.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    positives: NDArray[np.int64]
    auc: NDArray[np.float64]
    logloss: NDArray[np.float64]
    calibration: NDArray[np.float64]

    def weighted_auc(self) -> float:
        """Returns the mean AUC of the segments that have one, weighted by their rows; nan where none has.

        Called GAUC, or user-weighted AUC. It ranks within segments only: knowing which users click most gains nothing.

        Source: Zhou et al. 2018, Deep Interest Network for Click-Through Rate Prediction, section 6.3.
        """
        counts = ~np.isnan(self.auc)
        return float(np.average(self.auc[counts], weights=self.rows[counts])) if counts.any() else math.nan

    def weighted_auc_rows(self) -> int:
        """Returns the rows of the segments that have an AUC."""
        return int(self.rows[~np.isnan(self.auc)].sum())


def segment_figures(scores: Scores) -> SegmentFigures:
    """Computes the figures of each segment; rows outside all segments count in none.

    All segments are done at once, after one sort of the rows.

    Raises:
        ValueError: the scores have no segments, or a logit is not finite.
    """
    if scores.segments is None or scores.in_segment is None:
        raise ValueError("these scores have no segments: predict with a segment field")
    inside = scores.in_segment.numpy()
    segments, logits = scores.segments.numpy()[inside], scores.logits.numpy()[inside]
    order = np.lexsort((logits, segments))
    segments, logits, positive = segments[order], logits[order], scores.labels.numpy()[inside][order] == 1
    starts = _run_starts(segments)
    if starts.size == 0:
        return _sorted_by_rows(SegmentFigures(segments, starts, starts, *np.empty((3, 0))))
    rows, positives = _lengths(starts, segments.size), np.add.reduceat(positive, starts, dtype=np.int64)
    predicted = np.add.reduceat(scores.probabilities().numpy()[inside][order], starts)
    losses = np.add.reduceat(row_losses(positive, logits), starts)
    figures = SegmentFigures(
        ids=segments[starts],
        rows=rows,
        positives=positives,
        auc=_auc_by_run(segments, logits, positive),
        logloss=losses / rows,
        calibration=np.divide(predicted, positives, out=np.full(rows.size, np.nan), where=positives > 0),
    )
    return _sorted_by_rows(figures)


def write_segments(path: Path, figures_of_part: Mapping[str, SegmentFigures]) -> None:
    """Writes `segments.csv`: a line a segment, the parts one after the other; undefined figures are empty."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("part", "segment", "rows", "positives", "auc", "logloss", "calibration"))
        for part, figures in figures_of_part.items():
            whole = zip(figures.ids.tolist(), figures.rows.tolist(), figures.positives.tolist(), strict=True)
            shares = zip(figures.auc.tolist(), figures.logloss.tolist(), figures.calibration.tolist(), strict=True)
            for counts, ratios in zip(whole, shares, strict=True):
                writer.writerow((part, *counts, *("" if math.isnan(x) else x for x in ratios)))


def _auc_by_run(
    segments: NDArray[np.int64], logits: NDArray[np.floating], positive: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The AUC of each segment, rows sorted by (segment, logit); pairs are counted in integers as in `metrics.auc`."""
    starts = np.flatnonzero(_begins_run(segments) | _begins_run(logits))  # of ties within a segment
    tied_positives = np.add.reduceat(positive, starts, dtype=np.int64)
    tied_negatives = _lengths(starts, segments.size) - tied_positives
    first_ties = _run_starts(segments[starts])
    positives, negatives = np.add.reduceat(tied_positives, first_ties), np.add.reduceat(tied_negatives, first_ties)
    below = tied_negatives.cumsum() - tied_negatives
    below -= np.repeat(below[first_ties], _lengths(first_ties, starts.size))
    twice_won = np.add.reduceat(tied_positives * (2 * below + tied_negatives), first_ties)
    pairs = positives * negatives
    return np.divide(twice_won, 2 * pairs, out=np.full(pairs.size, np.nan), where=pairs > 0)


def _begins_run(values: NDArray) -> NDArray[np.bool_]:
    begins = np.ones(values.size, dtype=bool)
    begins[1:] = values[1:] != values[:-1]
    return begins


def _run_starts(values: NDArray) -> NDArray[np.int64]:
    return np.flatnonzero(_begins_run(values))


def _lengths(starts: NDArray[np.int64], stop: int) -> NDArray[np.int64]:
    return np.diff(starts, append=stop)


def _sorted_by_rows(figures: SegmentFigures) -> SegmentFigures:
    order = np.lexsort((figures.ids, -figures.rows))
    return SegmentFigures(
        figures.ids[order],
        figures.rows[order],
        figures.positives[order],
        figures.auc[order],
        figures.logloss[order],
        figures.calibration[order],
    )
