"""Logistic regression over a table of one weight per id: `logit = b + sum_i w_i x_i`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding
from recstore_ops.training.batch import sum_by_row


class LogisticRegression(nn.Module):
    """Predicts the log-odds of a click from sparse features.

    Args:
        name: the weights live in the table `<name>/w`.
        optimizer: kind and hyper-parameters of the table's optimizer, as in `DistEmbedding`.
        bias: whether b is learnt (a dense parameter that starts at zero) or absent.
        num_embeddings: None for an open vocabulary; then an unknown id weighs zero and gets no row
            from prediction.
    """

    def __init__(
        self,
        name: str,
        optimizer: dict,
        *,
        bias: bool = True,
        num_embeddings: int | None = None,
    ) -> None:
        super().__init__()
        zeros = {"kind": "zeros"}
        self.w = DistEmbedding(num_embeddings, 1, f"{name}/w", optimizer=optimizer, initializer=zeros)
        self.bias = nn.Parameter(torch.zeros(())) if bias else None

    def forward(self, ids: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Returns logits, float32 [B].

        Args:
            ids: int64 [N]; values: float32 [N]; offsets: int64 [B + 1], as in `Batch`.
        """
        logits_B = sum_by_row(self.w(ids) * values[:, None], offsets).squeeze(1)
        return logits_B if self.bias is None else logits_B + self.bias
