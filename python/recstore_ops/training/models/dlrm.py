"""DLRM: dense features through a bottom perceptron, dot products of all pairs, and a top perceptron over them.

Source: Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recstore_ops.training.data.batch import Batch, sum_by_field, weighted
from recstore_ops.training.models.perceptron import perceptron
from recstore_ops.training.models.tables import Tables


class DLRM(nn.Module):
    """Predicts the log-odds of a click from the dot products of its features' embeddings.

    Args:
        tables: makes the table `v`, `dim` columns an id.
        dim: columns of an embedding, and outputs of the bottom perceptron.
        num_fields: fields of a row; a field's embedding is the sum over its ids.
        bottom: sizes of the bottom perceptron's hidden layers; unused without dense features.
        hidden: sizes of the top perceptron's hidden layers.
        dropout: after each hidden layer of the top perceptron.
        init_std: embeddings start normal with this standard deviation.
        num_dense: dense features of a row. Without any there is no bottom perceptron.

    Raises:
        ValueError: less than two vectors to take dot products of.
    """

    def __init__(
        self,
        tables: Tables,
        dim: int,
        *,
        num_fields: int,
        bottom: Sequence[int] = (64,),
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        init_std: float = 0.01,
        num_dense: int = 0,
    ) -> None:
        super().__init__()
        vectors = num_fields + (num_dense > 0)
        if vectors < 2:
            raise ValueError(f"DLRM takes dot products of at least two features, got {num_fields} fields and no dense")
        self.v = tables("v", dim, init_std)
        self.bottom = nn.Sequential(perceptron([num_dense, *bottom, dim]), nn.ReLU()) if num_dense else None
        pairs = torch.triu_indices(vectors, vectors, offset=1)
        self.pairs: Tensor
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1], persistent=False)
        self.top = perceptron([self.pairs.numel() + (dim if num_dense else 0), *hidden, 1], dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32 [B]."""
        vectors_BFD = sum_by_field(weighted(self.v(batch.ids), batch), batch)
        if self.bottom is None:
            return self.top(self._dots(vectors_BFD)).squeeze(1)
        dense_BD = self.bottom(batch.dense)
        dots_BP = self._dots(torch.cat([dense_BD[:, None], vectors_BFD], dim=1))
        return self.top(torch.cat([dense_BD, dots_BP], dim=1)).squeeze(1)

    def _dots(self, vectors_BFD: Tensor) -> Tensor:
        """The dot product of each pair of vectors, [B, P]."""
        dots_BFF = torch.bmm(vectors_BFD, vectors_BFD.transpose(1, 2))
        return dots_BFF.flatten(1).index_select(1, self.pairs)
