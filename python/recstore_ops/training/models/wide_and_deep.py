"""Wide & Deep: a linear model over features and crosses of them, and a perceptron over embeddings, logits added.

A cross is one more feature, which is 1 if two fields have two given ids. Its id is a hash of both. A table with an
open vocabulary takes it as it is: no pair needs to be known beforehand, and two pairs share a weight with probability
2^-64.

Source: Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from recstore_ops.ops import operators
from recstore_ops.training.data.batch import Batch, weighted
from recstore_ops.training.models.deepfm import concatenated_fields
from recstore_ops.training.models.logistic_regression import LogisticRegression
from recstore_ops.training.models.perceptron import perceptron
from recstore_ops.training.models.tables import Tables


class WideAndDeep(nn.Module):
    """Predicts the log-odds of a click from memorized weights and a perceptron.

    Args:
        tables: makes `w`, one weight an id, `v`, `dim` columns an id, and with crosses `crosses`, one weight a pair.
        dim: columns of v.
        num_fields: fields of a row; the perceptron sees the sum of each field's embeddings.
        crosses: pairs of fields whose pairs of ids get a weight each; such fields must have one id a row.
        hidden: sizes of the perceptron's hidden layers.
        dropout: after each hidden layer.
        init_std: v starts normal with this standard deviation.
        num_dense, bias: as in `LogisticRegression`.

    Raises:
        ValueError: a cross of a field that is not there, or of a field with itself.
    """

    def __init__(
        self,
        tables: Tables,
        dim: int,
        *,
        num_fields: int,
        crosses: Sequence[tuple[int, int]] = (),
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        init_std: float = 0.01,
        num_dense: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        for first, second in crosses:
            if first == second or not (0 <= first < num_fields and 0 <= second < num_fields):
                raise ValueError(f"a cross needs two of the {num_fields} fields, got {first} and {second}")
        self.wide = LogisticRegression(tables, num_dense=num_dense, bias=bias)
        self.crosses = tables("crosses", 1) if crosses else None
        self.crossed_fields = list(crosses)
        self.v = tables("v", dim, init_std)
        self.deep = perceptron([num_fields * dim + num_dense, *hidden, 1], dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32 [B].

        Raises:
            ValueError: a model with crosses got fields without or with several ids.
        """
        features_ND = weighted(self.v(batch.ids), batch)
        logits_B = self.wide(batch) + self.deep(concatenated_fields(features_ND, batch)).squeeze(1)
        return logits_B if self.crosses is None else logits_B + self.crosses(self._crossed(batch)).sum((1, 2))

    def _crossed(self, batch: Batch) -> Tensor:
        """The id of each cross, int64 [B, C]."""
        if batch.offsets is not None:
            raise ValueError("crosses need exactly one id a field")
        ids_BF = batch.ids.view(-1, batch.num_fields)
        first_BC, second_BC = (ids_BF[:, list(fields)] for fields in zip(*self.crossed_fields, strict=True))
        return operators.cross_ids([first_BC, second_BC])
