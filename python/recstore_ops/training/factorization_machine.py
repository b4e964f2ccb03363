"""The factorization machine of degree two, over a table of weights and a table of factors:

    logit = b + sum_i w_i x_i + 1/2 sum_k [(sum_i v_ik x_i)^2 - sum_i v_ik^2 x_i^2]

The square is taken for each column k by itself; squaring the sum over all columns would leave a
model that cannot represent most interactions.

Source: Rendle 2010, "Factorization Machines", lemma 3.1.
"""

from __future__ import annotations

from torch import Tensor, nn

from recstore_ops import DistEmbedding
from recstore_ops.training.batch import sum_by_row
from recstore_ops.training.logistic_regression import LogisticRegression


class FactorizationMachine(nn.Module):
    """Predicts the log-odds of a click from sparse features and all their pairs.

    Args:
        name: the tables are `<name>/w`, one weight an id, and `<name>/v`, `dim` factors an id.
        dim: columns of v.
        optimizer: kind and hyper-parameters of both tables' optimizer, as in `DistEmbedding`.
        init_std: v starts normal with mean zero and this standard deviation, w at zero. With zeros
            v would never move: its gradient is a product with other rows of v.
        bias: whether b is learnt (a dense parameter that starts at zero) or absent.
        num_embeddings: None for an open vocabulary; then an unknown id reads as its initial value
            and gets no row from prediction.
        seed: of v's initial values, together with the name.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        optimizer: dict,
        *,
        init_std: float = 0.01,
        bias: bool = True,
        num_embeddings: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.linear = LogisticRegression(name, optimizer, bias=bias, num_embeddings=num_embeddings)
        normal = {"kind": "normal", "std": init_std}
        self.v = DistEmbedding(num_embeddings, dim, f"{name}/v", optimizer=optimizer, initializer=normal, seed=seed)

    def forward(self, ids: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Returns logits, float32 [B].

        Args:
            ids: int64 [N]; values: float32 [N]; offsets: int64 [B + 1], as in `Batch`.
        """
        factors_ND = self.v(ids) * values[:, None]
        sums_BD = sum_by_row(factors_ND, offsets)
        squares_BD = sum_by_row(factors_ND.square(), offsets)
        pairs_B = 0.5 * (sums_BD.square() - squares_BD).sum(1)
        return self.linear(ids, values, offsets) + pairs_B
