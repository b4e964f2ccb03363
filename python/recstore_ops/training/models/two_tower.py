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

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from recstore_ops.training.data.batch import Batch, weighted
from recstore_ops.training.data.query_items import QueryItemSplit, first_of_each, row_keys
from recstore_ops.training.models.deepfm import concatenated_fields
from recstore_ops.training.models.perceptron import perceptron
from recstore_ops.training.models.tables import Tables

_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd numbers of 64 bits; the upper bits of a key's product with one are its bucket."""


class ItemFrequency(nn.Module):
    """The probability that an item is in a batch, estimated from the stream of batches in memory of a fixed size.

    The mean number of batches from one with an item to the next with it is one over that probability. An item's bucket
    keeps the last batch with it and a moving mean of these gaps. Items that share a bucket seem more frequent than they
    are, so an item has one bucket under each of several hash functions, and the longest of their mean gaps counts.

    Source: Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", algorithm
    2, and the end of section 4 for several hash functions. In addition, the mean of an item's first 1 / alpha gaps
    weighs all of them alike, so that no estimate is biased towards its initial value.

    Shapes: H hash functions, M buckets.

    Args:
        bits: there are 2^bits buckets for each of the hash functions, 12 bytes each.
        alpha: the weight of the newest gap in the mean of more than 1 / alpha.
    """

    batches: Tensor
    last_HM: Tensor
    gap_HM: Tensor
    times_HM: Tensor

    def __init__(self, bits: int = 17, alpha: float = 0.01) -> None:
        super().__init__()
        self._bits = bits
        self._alpha = alpha
        shape = len(_FACTORS), 1 << bits
        self.register_buffer("batches", torch.zeros((), dtype=torch.int32, device="cpu"))
        self.register_buffer("last_HM", torch.zeros(shape, dtype=torch.int32, device="cpu"))
        self.register_buffer("gap_HM", torch.zeros(shape, dtype=torch.float32, device="cpu"))
        self.register_buffer("times_HM", torch.zeros(shape, dtype=torch.int32, device="cpu"))

    def count(self, keys_C: Tensor) -> None:
        """Takes the items of the next batch, by their keys, int64, none twice."""
        self.batches += 1
        at = torch.arange(len(_FACTORS), device=keys_C.device, dtype=torch.int64)[:, None], self._buckets(keys_C)
        seen_HC, mean_HC = self.times_HM[at] + 1, self.gap_HM[at]
        # Until there are 1 / alpha gaps their plain mean counts, which the initial zero does not bias.
        weight_HC = seen_HC.to(mean_HC.dtype).reciprocal().clamp(min=self._alpha)
        # Items of one batch in one bucket are one arrival there: they write equal numbers.
        self.gap_HM[at] = mean_HC + weight_HC * (self.batches - self.last_HM[at] - mean_HC)
        self.last_HM[at] = self.batches
        self.times_HM[at] = seen_HC

    def log_probability(self, keys_C: Tensor) -> Tensor:
        """Returns the logarithm of the probability that each item is in a batch, [C]; 0 of one never counted."""
        gaps_HC = self.gap_HM.gather(1, self._buckets(keys_C))
        return -gaps_HC.amax(0).clamp(min=1).log()

    def _buckets(self, keys_C: Tensor) -> Tensor:
        """The bucket of each item under each hash function, int64 [H, C]."""
        factors = torch.tensor([_signed(factor) for factor in _FACTORS], dtype=torch.int64, device=keys_C.device)
        return (keys_C * factors[:, None]) >> (64 - self._bits) & ((1 << self._bits) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


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
