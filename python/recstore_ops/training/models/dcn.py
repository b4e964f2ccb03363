"""DCN-V2: cross layers over the concatenated embeddings, before or beside a perceptron.

    x_{l+1} = x_0 * (W_l x_l + b_l) + x_l             * is element by element
    x_{l+1} = x_0 * (U_l (V_l^T x_l) + b_l) + x_l     of low rank

L layers hold all products of up to L + 1 elements of x_0.

Source: Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
Systems", equations 1 and 2 and section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from recstore_ops.training.data.batch import Batch, weighted
from recstore_ops.training.models.deepfm import concatenated_fields
from recstore_ops.training.models.perceptron import perceptron
from recstore_ops.training.models.tables import Tables

CrossStructure = Literal["stacked", "parallel"]


class DCN(nn.Module):
    """Predicts the log-odds of a click from products of features, up to an order, and a perceptron.

    Args:
        tables: makes the table `v`, `dim` columns an id.
        dim: columns of an embedding.
        num_fields: fields of a row; x_0 is the sum of each field's embeddings, side by side, and the dense features.
        cross_layers: L.
        low_rank: columns of U_l and V_l; None for full matrices W_l.
        cross_structure: "stacked" gives the last cross layer's output to the perceptron; "parallel" gives x_0 to the
            perceptron and adds a linear function of the last cross layer's output to its logit.
        hidden: sizes of the perceptron's hidden layers.
        dropout: after each hidden layer.
        init_std: embeddings start normal with this standard deviation.
        num_dense: dense features of a row.

    Raises:
        ValueError: no cross layer, or a low rank that saves nothing.
    """

    def __init__(
        self,
        tables: Tables,
        dim: int,
        *,
        num_fields: int,
        cross_layers: int = 2,
        low_rank: int | None = None,
        cross_structure: CrossStructure = "stacked",
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        init_std: float = 0.01,
        num_dense: int = 0,
    ) -> None:
        super().__init__()
        if cross_layers < 1:
            raise ValueError(f"cross_layers must be at least 1, got {cross_layers}")
        width = num_fields * dim + num_dense
        if low_rank is not None and not 1 <= low_rank < width:
            raise ValueError(f"low_rank must be from 1 to before the {width} elements of a row, got {low_rank}")
        self.v = tables("v", dim, init_std)
        self.crosses = nn.ModuleList(_cross_matrix(width, low_rank) for _ in range(cross_layers))
        self.deep = perceptron([width, *hidden, 1], dropout=dropout)
        self.crossed = nn.Linear(width, 1, bias=False) if cross_structure == "parallel" else None

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32 [B]."""
        inputs_BX = concatenated_fields(weighted(self.v(batch.ids), batch), batch)
        crossed_BX = self._cross(inputs_BX)
        if self.crossed is None:
            return self.deep(crossed_BX).squeeze(1)
        # One linear layer over both outputs, as in the paper, is the sum of two.
        return (self.deep(inputs_BX) + self.crossed(crossed_BX)).squeeze(1)

    def _cross(self, inputs_BX: Tensor) -> Tensor:
        """The output of the last cross layer, [B, X]."""
        crossed_BX = inputs_BX
        for cross in self.crosses:
            crossed_BX = inputs_BX * cross(crossed_BX) + crossed_BX
        return crossed_BX


def _cross_matrix(width: int, low_rank: int | None) -> nn.Module:
    """W_l and b_l, or V_l, U_l and b_l."""
    if low_rank is None:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, low_rank, bias=False), nn.Linear(low_rank, width))
