"""Two towers: a vector for the query and one for the item, so that the best items of a query are its nearest vectors.

    score = <q, i> / temperature       q and i of length 1, each a perceptron of its side's fields

The loss of a positive row is the sampled softmax of its item among the items of its batch:

    -log( exp(s_own) / sum_c exp(s_c) )      s_c = score - log Q(c), c over the distinct items of the batch

Q(c) is the probability that a batch has item c, which popular items owe to their popularity. With it, scores tend to
log p(item | query), up to an addend for each query; without it, to log p(item | query) - log Q(item).

An item counts once, however often it is in the batch: then Q is the probability of a candidate, for popular items too,
and no row has its own item among the negatives. Rows of label 0 give candidates only.

Source: Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", section 3,
whose candidates are the items of all rows, equal ones as often as they are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import normalize

from recstore_ops.training.data.batch import Batch, weighted
from recstore_ops.training.data.query_items import QueryItemSplit, first_of_each, row_keys
from recstore_ops.training.models.deepfm import concatenated_fields
from recstore_ops.training.models.item_frequency import ItemFrequency
from recstore_ops.training.models.perceptron import perceptron
from recstore_ops.training.models.tables import Tables


class TwoTower(nn.Module):
    """Scores items for queries, to retrieve the best of many.

    Args:
        tables: makes the table `v`, `dim` columns an id, for both towers.
        dim: columns of an embedding.
        num_fields: fields of a row.
        items: those of the item; all others and the dense features are the query's.
        hidden: sizes of the hidden layers of each tower; without any a tower is one linear layer.
        dropout: after each hidden layer.
        vector_dim: columns of the vectors.
        temperature: scores are from -1 / temperature to 1 / temperature.
        popularity_correction: whether the loss takes log Q off the scores.
        init_std: embeddings start normal with this standard deviation.
        num_dense: dense features of a row.

    Attributes:
        sides: cuts rows into query and item.

    Raises:
        ValueError: as `QueryItemSplit`.
    """

    def __init__(
        self,
        tables: Tables,
        dim: int,
        *,
        num_fields: int,
        items: Sequence[int],
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        vector_dim: int = 32,
        temperature: float = 0.1,
        popularity_correction: bool = True,
        init_std: float = 0.1,
        num_dense: int = 0,
    ) -> None:
        super().__init__()
        self.sides = QueryItemSplit(num_fields, tuple(items))
        self.temperature = temperature
        self.v = tables("v", dim, init_std)
        query_inputs = len(self.sides.queries) * dim + num_dense
        self.query_tower = perceptron([query_inputs, *hidden, vector_dim], dropout=dropout)
        self.item_tower = perceptron([len(items) * dim, *hidden, vector_dim], dropout=dropout)
        self.frequency = ItemFrequency() if popularity_correction else None

    def forward(self, batch: Batch) -> Tensor:
        """Returns the score of each row's own pair, float32 [B]."""
        return (self.query_vectors(batch) * self.item_vectors(batch)).sum(1) / self.temperature

    def query_vectors(self, batch: Batch) -> Tensor:
        """Returns the vector of each row's query, float32 [B, vector_dim], of length 1.

        Raises:
            ValueError: the rows have neither all fields nor exactly those of queries.
        """
        return self._vectors(self.query_tower, self.sides.query(batch))

    def item_vectors(self, batch: Batch) -> Tensor:
        """Returns the vector of each row's item, float32 [B, vector_dim], of length 1.

        Raises:
            ValueError: the rows have neither all fields nor exactly those of items.
        """
        return self._vectors(self.item_tower, self.sides.item(batch))

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns each row's loss in nats and its weight in the mean, [B] each; both are 0 in rows of label 0.

        In training mode the batch's items are counted for Q.
        """
        items = self.sides.item(batch)
        keys_C, first_C, column_B = first_of_each(row_keys(items))
        positive_P = (batch.labels == 1).nonzero().squeeze(1)
        queries_PD = self.query_vectors(self.sides.query(batch).take(positive_P))
        scores_PC = queries_PD @ self.item_vectors(items.take(first_C)).T / self.temperature
        if self.frequency is not None:
            if self.training:
                self.frequency.count(keys_C)
            scores_PC = scores_PC - self.frequency.log_probability(keys_C)
        # cross_entropy computes the same, but wakes all threads for a batch of any size.
        losses_P = scores_PC.logsumexp(1) - scores_PC.gather(1, column_B[positive_P, None]).squeeze(1)
        losses_B = losses_P.new_zeros(len(batch)).index_copy(0, positive_P, losses_P)
        is_positive_B = (batch.labels == 1).to(losses_B.dtype)
        return losses_B, is_positive_B if batch.weights is None else is_positive_B * batch.weights

    def _vectors(self, tower: nn.Module, side: Batch) -> Tensor:
        return normalize(tower(concatenated_fields(weighted(self.v(side.ids), side), side)), dim=1)
