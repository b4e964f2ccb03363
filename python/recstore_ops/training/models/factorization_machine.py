"""The factorization machine of degree two, over a table of weights and a table of factors:

    logit = b + sum_i w_i x_i + 1/2 sum_k [(sum_i v_ik x_i)^2 - sum_i v_ik^2 x_i^2]

The square is taken for each column k by itself; squaring the sum over all columns would leave a
model that cannot represent most interactions. Dense features have weights only.

Source: Rendle 2010, "Factorization Machines", lemma 3.1.
"""

from __future__ import annotations

from torch import Tensor, nn

from recstore_ops.training.data.batch import Batch, sum_by_row, weighted
from recstore_ops.training.models.logistic_regression import LogisticRegression
from recstore_ops.training.models.tables import Tables


class FactorizationMachine(nn.Module):
    """Predicts the log-odds of a click from features and all pairs of sparse ones.

    Args:
        tables: makes `w`, one weight an id, and `v`, `dim` factors an id.
        dim: columns of v.
        init_std: v starts normal with this standard deviation. With zeros it would never move: its gradient is a
            product with other rows of v.
        num_dense, bias: as in `LogisticRegression`.
    """

    def __init__(
        self, tables: Tables, dim: int, *, init_std: float = 0.01, num_dense: int = 0, bias: bool = True
    ) -> None:
        super().__init__()
        self.linear = LogisticRegression(tables, num_dense=num_dense, bias=bias)
        self.v = tables("v", dim, init_std)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32 [B]."""
        return self.logits(batch, self.factors(batch))

    def factors(self, batch: Batch) -> Tensor:
        """Returns `v_i x_i` of each id, [N, D]."""
        return weighted(self.v(batch.ids), batch)

    def logits(self, batch: Batch, factors_ND: Tensor) -> Tensor:
        """Returns logits, float32 [B], from factors that the caller needs too."""
        return self.linear(batch) + sum_over_pairs(factors_ND, batch)


def sum_over_pairs(factors_ND: Tensor, batch: Batch) -> Tensor:
    """Returns the sum of the dot products of all pairs of a row's factors, [B]."""
    sums_BD = sum_by_row(factors_ND, batch)
    squares_B = sum_by_row(factors_ND.square().sum(1, keepdim=True), batch).squeeze(1)
    return 0.5 * (sums_BD.square().sum(1) - squares_B)
