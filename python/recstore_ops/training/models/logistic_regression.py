"""Logistic regression: `logit = b + sum_i w_i x_i`, the weights of sparse features in a table of one column."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recstore_ops.training.data.batch import Batch, sum_by_row, weighted
from recstore_ops.training.models.tables import Tables


class LogisticRegression(nn.Module):
    """Predicts the log-odds of a click.

    Args:
        tables: makes the table `w`, one weight an id, which starts at zero.
        num_dense: dense features; their weights start at zero too.
        bias: whether b is learnt (it starts at zero) or absent.
    """

    def __init__(self, tables: Tables, *, num_dense: int = 0, bias: bool = True) -> None:
        super().__init__()
        self.w = tables("w", 1)
        self.dense = _parameter(num_dense) if num_dense else None
        self.bias = _parameter() if bias else None

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32 [B]."""
        logits_B = sum_by_row(weighted(self.w(batch.ids), batch), batch).squeeze(1)
        if self.dense is not None:
            assert batch.dense is not None, "a model with dense features needs a batch with them"
            logits_B = logits_B + batch.dense @ self.dense
        return logits_B if self.bias is None else logits_B + self.bias


def _parameter(*shape: int) -> nn.Parameter:
    """Zeros of the default type on the default device, as the parameters of `torch.nn` are."""
    return nn.Parameter(torch.zeros(shape, dtype=torch.get_default_dtype(), device=torch.get_default_device()))
