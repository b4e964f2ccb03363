"""Scores a model on held-out rows. Reading changes no table, so an unknown id costs no memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recstore_ops.training.batch import Batch
from recstore_ops.training.metrics import auc, logloss


@dataclass(frozen=True)
class Evaluation:
    """Figures on `rows` rows: logloss in nats; AUC, nan where only one class is present."""

    rows: int
    auc: float
    logloss: float

    @property
    def has_one_class(self) -> bool:
        """Whether the AUC is undefined because all labels are equal."""
        return math.isnan(self.auc)


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
    """Evaluates a model on all rows of `batches`; keeps 8 bytes a row.

    Raises:
        ValueError: there are no rows.
    """
    labels, logits = predict(model, batches)
    if labels.numel() == 0:
        raise ValueError("no rows to evaluate; a small validation fraction may hold out none")
    one_class = bool((labels == labels[:1]).all())
    return Evaluation(
        rows=labels.numel(),
        auc=math.nan if one_class else auc(labels, logits),
        logloss=logloss(labels, logits),
    )


def predict(model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Returns labels and logits, float32 [B] each, of all rows in order."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        pairs = [(b.labels, model(b.ids, b.values, b.offsets)) for b in batches]
    model.train(was_training)
    empty = torch.empty(0)
    return (
        torch.cat([empty, *(labels for labels, _ in pairs)]),
        torch.cat([empty, *(logits for _, logits in pairs)]),
    )
