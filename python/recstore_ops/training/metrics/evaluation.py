"""Scores a model on held-out rows. Reading changes no table, so an unknown id costs no memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops.training.data.batch import NO_GROUP, Batch
from recstore_ops.training.metrics.classification import auc, logloss

FIGURE_TITLES = {
    "logloss": "logloss",
    "auc": "AUC",
    "calibration": "calibration",
    "recall_at_10": "recall@10",
    "ndcg_at_10": "NDCG@10",
}
"""How reports call the figures of an evaluation."""
_NO_VALUE = "(no value)"


@dataclass(frozen=True)
class Scores:
    """The predictions of a model for B rows, with the rows' labels.

    Attributes:
        labels: float32 [B], each 0 or 1.
        logits: float32 [B].
        segments: int64 [B], the group of each row, or the id that it has in one field; None without either.
        in_segment: bool [B], whether the row has such an id at all; None together with `segments`.
        texts: the text of each segment, if segments stand for text; else None.
    """

    labels: Tensor
    logits: Tensor
    segments: Tensor | None = None
    in_segment: Tensor | None = None
    texts: dict[int, str] | None = None

    def __len__(self) -> int:
        return self.labels.numel()

    def with_texts(self, texts: Mapping[int, str]) -> Scores:
        """Returns the same scores with those of the given texts that their segments stand for."""
        if self.segments is None or not texts:
            return self
        there = self.segments.unique().tolist()
        return replace(self, texts={segment: texts[segment] for segment in there if segment in texts})

    def with_rows_of_no_segment(self) -> Scores:
        """Returns the same scores with the rows without a segment, if any, in a segment named so."""
        if self.segments is None or self.in_segment is None or bool(self.in_segment.all()):
            return self
        segments = self.segments.masked_fill(~self.in_segment, NO_GROUP)
        inside = torch.ones_like(self.in_segment)
        return replace(self, segments=segments, in_segment=inside, texts={**(self.texts or {}), NO_GROUP: _NO_VALUE})

    def probabilities(self) -> Tensor:
        """Returns the predicted probabilities, float64 [B]."""
        return self.logits.double().sigmoid()


@dataclass(frozen=True)
class Evaluation:
    """Figures on held-out rows.

    Attributes:
        rows, positives: how many.
        auc: nan if only one class is present, and for models that retrieve.
        logloss: in nats; of models that retrieve, the mean over positive rows of -log p(item | query) among all
            candidates.
        calibration: mean predicted probability divided by the share of positives, 1 is right; nan without positives.
            Source: He et al. 2014, Practical Lessons from Predicting Clicks on Ads at Facebook.
        recall, ndcg: recall@10 and NDCG@10 of models that retrieve, see `RankingFigures`; None for other models, whose
            auc and calibration take their place.
    """

    rows: int
    positives: int
    auc: float
    logloss: float
    calibration: float
    recall: float | None = None
    ndcg: float | None = None

    @classmethod
    def of(cls, scores: Scores) -> Evaluation:
        """Computes the figures.

        Raises:
            ValueError: there are no rows, or a logit is not finite.
        """
        rows, positives = len(scores), int((scores.labels == 1).sum())
        if rows == 0:
            raise ValueError("no rows to evaluate; a small validation fraction may hold out none")
        return cls(
            rows=rows,
            positives=positives,
            auc=auc(scores.labels, scores.logits) if 0 < positives < rows else math.nan,
            logloss=logloss(scores.labels, scores.logits),
            calibration=float(scores.probabilities().sum()) / positives if positives else math.nan,
        )

    @property
    def has_one_class(self) -> bool:
        """Whether the AUC is undefined because all labels are equal."""
        return math.isnan(self.auc) and self.recall is None

    def figures(self) -> dict[str, float]:
        """Returns the figures that the model is judged by, by name in `FIGURE_TITLES`; nan for an undefined one."""
        if self.recall is not None and self.ndcg is not None:
            return {"logloss": self.logloss, "recall_at_10": self.recall, "ndcg_at_10": self.ndcg}
        return {"logloss": self.logloss, "auc": self.auc, "calibration": self.calibration}

    def as_json(self) -> dict[str, Any]:
        """Returns rows and figures; None for an undefined figure."""
        figures = {name: None if math.isnan(figure) else figure for name, figure in self.figures().items()}
        return {"rows": self.rows, **figures}


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
    """Evaluates a model on all rows of `batches`; raises as `predict` and `Evaluation.of` do."""
    return Evaluation.of(predict(model, batches))


def predict(model: nn.Module, batches: Iterable[Batch], *, segment_field: int | None = None) -> Scores:
    """Returns the scores of all rows in order; keeps 8 bytes a row, and 9 more with segments.

    Segments are the ids of a field. If no field is given, they are the groups of the rows, if rows have groups.

    The model is called as `model(batch)` in evaluation mode and without gradients, and gives logits [B].

    Raises:
        ValueError: there is no such field, or a row has several ids in it.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [_scores(model, batch, segment_field) for batch in batches]
    finally:
        model.train(was_training)
    return concatenated(parts)


def _scores(model: nn.Module, batch: Batch, segment_field: int | None) -> Scores:
    if segment_field is not None:
        segments = _segments(batch, segment_field)
    else:
        segments = (None, None) if batch.groups is None else (batch.groups, batch.groups != NO_GROUP)
    return Scores(batch.labels, model(batch), *segments)


def _segments(batch: Batch, field: int) -> tuple[Tensor, Tensor]:
    """The id of each row in a field, int64 [B], and whether there is one, bool [B]."""
    if not 0 <= field < batch.num_fields:
        raise ValueError(f"no field {field}: the rows have {batch.num_fields}, counted from 0")
    offsets = batch.offsets_or_ones()
    starts, lengths = offsets[:-1][field :: batch.num_fields], offsets.diff()[field :: batch.num_fields]
    if bool((lengths > 1).any()):
        raise ValueError(f"a row has {int(lengths.max())} ids in field {field}; segments take a field of one id a row")
    present = lengths == 1
    ids = torch.zeros(len(batch), dtype=torch.int64, device="cpu")
    ids[present] = batch.ids[starts[present]]
    return ids, present


def concatenated(parts: Sequence[Scores]) -> Scores:
    """Returns the scores of all parts in order."""
    segments = [part.segments for part in parts if part.segments is not None]
    in_segment = [part.in_segment for part in parts if part.in_segment is not None]
    # In front of the parts, since torch.cat refuses an empty list.
    empty = torch.empty(0, dtype=torch.float32, device="cpu")
    return Scores(
        torch.cat([empty, *(part.labels for part in parts)]),
        torch.cat([empty, *(part.logits for part in parts)]),
        torch.cat(segments) if segments else None,
        torch.cat(in_segment) if in_segment else None,
    )
