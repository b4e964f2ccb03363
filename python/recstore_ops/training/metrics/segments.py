"""How good a model is on each id of one field or in each group of rows, on each user for example."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from recstore_ops.config.directory import replace_file
from recstore_ops.training.data.number_keys import numbers_of_keys
from recstore_ops.training.metrics.classification import row_losses
from recstore_ops.training.metrics.evaluation import Scores

NUMBER_PARTS = 10


def in_number_parts(scores: Scores) -> Scores:
    """Returns scores whose segments are keys of numbers with up to `NUMBER_PARTS` parts as segments, from 0 on.

    Equal numbers are in one part, so that there may be fewer. The texts are the parts' bounds.

    Raises:
        ValueError: the scores have no segments.
    """
    if scores.segments is None or scores.in_segment is None:
        raise ValueError("these scores have no segments: there is nothing to cut into parts")
    inside = scores.in_segment.numpy()
    numbers = numbers_of_keys(scores.segments.numpy()[inside])
    segments = np.zeros(len(inside), dtype=np.int64)
    if numbers.size == 0:
        return replace(scores, segments=torch.from_numpy(segments), texts=None)
    in_order = np.sort(numbers)
    starts = np.unique(in_order[np.arange(NUMBER_PARTS) * numbers.size // NUMBER_PARTS])
    segments[inside] = np.searchsorted(starts, numbers, side="right") - 1
    ends = [f"{end:g})" for end in starts[1:]] + [f"{in_order[-1]:g}]"]
    texts = {part: f"[{start:g}, {end}" for part, (start, end) in enumerate(zip(starts, ends, strict=True))}
    return replace(scores, segments=torch.from_numpy(segments), texts=texts)


SegmentOrder = Literal["rows", "logloss", "auc", "error", "value"]
RANKED_ROWS = 10
"""The k of recall@k and NDCG@k within a segment."""
_DISCOUNTS = 1 / np.log2(np.arange(RANKED_ROWS) + 2)


@dataclass(frozen=True)
class SegmentFigures:
    """Figures of S segments, those with most rows first, among equals by id.

    Attributes:
        ids, rows, positives: int64 [S].
        auc: float64 [S], nan for a segment with one class only.
        logloss: float64 [S], in nats.
        calibration: float64 [S], mean predicted probability divided by the share of positives; nan without positives.
        prediction: float64 [S], the mean predicted probability.
        recall, ndcg: float64 [S], of the positive rows in the segment's rows by their logits, at `RANKED_ROWS`; nan
            without positives. Defined as in `ranking_at`, with the same treatment of ties.
        texts: the text of each id, if ids stand for text.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    positives: NDArray[np.int64]
    auc: NDArray[np.float64]
    logloss: NDArray[np.float64]
    calibration: NDArray[np.float64]
    prediction: NDArray[np.float64]
    recall: NDArray[np.float64]
    ndcg: NDArray[np.float64]
    texts: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.ids.size

    def names(self, most: int | None = None) -> list[str]:
        """Returns the text of each of at most `most` segments, or its id in digits."""
        return [self.texts.get(segment, str(segment)) for segment in self.ids[:most].tolist()]

    def positive_shares(self) -> NDArray[np.float64]:
        """Returns the share of positive rows of each segment, [S]."""
        return self.positives / self.rows

    def ordered(self, order: SegmentOrder) -> SegmentFigures:
        """Returns the segments in another order; those without the figure come last, and equal ones stay.

        Args:
            order: "rows" is most first; "logloss" highest first; "auc" lowest first; "error" the greatest difference
                first between the sum of the predictions and the number of positive rows; "value" is by id.
        """
        keys = {
            "value": self.ids,
            "rows": -self.rows.astype(np.float64),
            "logloss": -self.logloss,
            "auc": self.auc,
            "error": -np.abs(self.prediction * self.rows - self.positives),
        }
        return self._taken(np.argsort(keys[order], kind="stable"))

    def mean_ranking(self) -> tuple[float, float]:
        """Returns recall and NDCG, each the mean over the segments with positive rows; nan if there is none."""
        asked = self.positives > 0
        if not asked.any():
            return math.nan, math.nan
        return float(self.recall[asked].mean()), float(self.ndcg[asked].mean())

    def _taken(self, places: NDArray[np.int64]) -> SegmentFigures:
        arrays = {each.name: getattr(self, each.name)[places] for each in fields(self) if each.name != "texts"}
        return SegmentFigures(**arrays, texts=self.texts)

    def weighted_auc(self) -> float:
        """Returns the mean AUC of the segments that have one, weighted by their rows; nan if none has.

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
    texts = scores.texts or {}
    if starts.size == 0:
        return SegmentFigures(segments, starts, starts, *np.empty((6, 0)), texts=texts)
    rows, positives = _lengths(starts, segments.size), np.add.reduceat(positive, starts, dtype=np.int64)
    predicted = np.add.reduceat(scores.probabilities().numpy()[inside][order], starts)
    losses = np.add.reduceat(row_losses(positive, logits), starts)
    recall, ndcg = _rankings_by_run(segments, logits, positive)
    figures = SegmentFigures(
        ids=segments[starts],
        rows=rows,
        positives=positives,
        auc=_auc_by_run(segments, logits, positive),
        logloss=losses / rows,
        calibration=np.divide(predicted, positives, out=np.full(rows.size, np.nan), where=positives > 0),
        prediction=predicted / rows,
        recall=recall,
        ndcg=ndcg,
        texts=texts,
    )
    # Segments are in the order of their ids.
    return figures.ordered("rows")


def write_segments(path: Path, figures_of_part: Mapping[str, SegmentFigures]) -> None:
    """Writes `segments.csv`: a line a segment, the parts one after the other; undefined figures are empty."""
    with io.StringIO(newline="") as file:
        writer = csv.writer(file)
        ratio_names = ("auc", "logloss", "calibration", "prediction", "recall", "ndcg")
        writer.writerow(("part", "segment", "rows", "positives", *ratio_names[:-2], "recall_at_10", "ndcg_at_10"))
        for part, figures in figures_of_part.items():
            whole = zip(figures.names(), figures.rows.tolist(), figures.positives.tolist(), strict=True)
            shares = zip(*(getattr(figures, name).tolist() for name in ratio_names), strict=True)
            for counts, ratios in zip(whole, shares, strict=True):
                writer.writerow((part, *counts, *("" if math.isnan(x) else x for x in ratios)))
        replace_file(path, file.getvalue().encode())


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
    # The sum runs through all segments, so what came before each of them is taken off again.
    below -= np.repeat(below[first_ties], _lengths(first_ties, starts.size))
    # Twice the pairs won, in which a tie counts one: whole numbers, so the AUC depends on no order of sums.
    twice_won = np.add.reduceat(tied_positives * (2 * below + tied_negatives), first_ties)
    pairs = positives * negatives
    return np.divide(twice_won, 2 * pairs, out=np.full(pairs.size, np.nan), where=pairs > 0)


def _rankings_by_run(
    segments: NDArray[np.int64], logits: NDArray[np.floating], positive: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Recall and NDCG of each segment, rows sorted by (segment, logit): expectations over the orders of ties."""
    starts = np.flatnonzero(_begins_run(segments) | _begins_run(logits))  # of ties within a segment
    tied, tied_positives = _lengths(starts, segments.size), np.add.reduceat(positive, starts, dtype=np.int64)
    first_ties = _run_starts(segments[starts])
    rows, positives = np.add.reduceat(tied, first_ties), np.add.reduceat(tied_positives, first_ties)
    # Ranks begin with the highest logit: those of a tie are from `above` + 1 to `above` + `tied`.
    before = tied.cumsum() - tied
    above = np.repeat(rows + before[first_ties], _lengths(first_ties, starts.size)) - before - tied
    found = []
    for gains, most in ((_gains_up_to(np.ones(RANKED_ROWS)), positives), (_gains_up_to(_DISCOUNTS), None)):
        ends = gains[np.minimum(above + tied, RANKED_ROWS)]
        # Each order of a tie is as likely as another: a positive row gets the mean gain of the ranks of its tie.
        of_ties = tied_positives * (ends - gains[np.minimum(above, RANKED_ROWS)]) / tied
        largest = gains[np.minimum(positives, RANKED_ROWS)] if most is None else most
        hits = np.add.reduceat(of_ties, first_ties)
        found.append(np.divide(hits, largest, out=np.full(hits.size, np.nan), where=positives > 0))
    return found[0], found[1]


def _gains_up_to(gains: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of the gains of the first 0, 1, ... ranks."""
    return np.concatenate([np.zeros(1), gains.cumsum()])


def _begins_run(values: NDArray) -> NDArray[np.bool_]:
    begins = np.ones(values.size, dtype=bool)
    begins[1:] = values[1:] != values[:-1]
    return begins


def _run_starts(values: NDArray) -> NDArray[np.int64]:
    return np.flatnonzero(_begins_run(values))


def _lengths(starts: NDArray[np.int64], stop: int) -> NDArray[np.int64]:
    return np.diff(starts, append=stop)
