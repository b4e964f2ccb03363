"""DeepFM: a factorization machine and a perceptron over the same factors, their logits added.

Source: Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", equations 1 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recstore_ops.training.data.batch import Batch, sum_by_field
from recstore_ops.training.models.factorization_machine import FactorizationMachine
from recstore_ops.training.models.perceptron import perceptron
from recstore_ops.training.models.tables import Tables


class DeepFM(nn.Module):
    """Predicts the log-odds of a click from features, pairs of sparse ones, and what a perceptron makes of all.

    Args:
        tables: makes `w` and `v`, as in `FactorizationMachine`.
        dim: columns of v.
        num_fields: fields of a row; the perceptron sees the sum of each field's factors.
        hidden: sizes of the perceptron's hidden layers.
        dropout: after each hidden layer.
        init_std, num_dense, bias: as in `FactorizationMachine`.
    """

    def __init__(
        self,
        tables: Tables,
        dim: int,
        *,
        num_fields: int,
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        init_std: float = 0.01,
        num_dense: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.fm = FactorizationMachine(tables, dim, init_std=init_std, num_dense=num_dense, bias=bias)
        self.deep = perceptron([num_fields * dim + num_dense, *hidden, 1], dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32 [B]."""
        factors_ND = self.fm.factors(batch)
        deep_B = self.deep(concatenated_fields(factors_ND, batch)).squeeze(1)
        return self.fm.logits(batch, factors_ND) + deep_B


def concatenated_fields(features_ND: Tensor, batch: Batch) -> Tensor:
    """Returns the sum of each field's features, side by side, and the dense features: [B, F * D + J]."""
    fields_BFD = sum_by_field(features_ND, batch).flatten(1)
    return fields_BFD if batch.dense is None else torch.cat([fields_BFD, batch.dense], dim=1)
