"""Evaluates a model that retrieves: how high it ranks the positive items of held-out rows among all candidates.

Candidates are the distinct items of some rows. Queries are the distinct query sides of a part's positive rows, and the
items of its positive rows with that query are relevant. Scores exist for one block of queries at a time.

Shapes: Q queries, I candidates, R distinct pairs of query and positive item, D columns of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from recstore_ops.training.data.batch import Batch, concatenate, offsets_of_lengths
from recstore_ops.training.data.query_items import QueryItemSplit, first_of_each, row_keys
from recstore_ops.training.metrics.evaluation import Evaluation

# The two figures of retrieval: recall@k and NDCG@k of scores over all items.
#
# Items with equal scores are in any order with equal probability, and the figures are the expectations over these
# orders. So they depend on no order of the items, and equal scores for all items gain nothing.
#
# Shapes: Q queries, I items, R relevant items of all queries together.


@dataclass(frozen=True)
class RankingFigures:
    """Means over the queries that have relevant items.

    Attributes:
        queries: how many these are.
        recall: the share of a query's relevant items among its k highest scores.
        ndcg: the discounted gain of a query's relevant items divided by the largest possible. Relevance is 0 or 1,
            and rank r counts 1 / log2(r + 1) up to k.
            Source: Jarvelin and Kekalainen 2002, Cumulated Gain-Based Evaluation of IR Techniques, with the discount
            of Burges et al. 2005, Learning to Rank using Gradient Descent.
    """

    queries: int
    recall: float
    ndcg: float


def ranking_at(k: int, scores_QI: Tensor, relevant_R: Tensor, offsets: Tensor) -> RankingFigures:
    """Computes recall@k and NDCG@k.

    Args:
        k: how many items are retrieved for a query.
        scores_QI: floating-point [Q, I], of each item for each query.
        relevant_R: int64 [R], columns of `scores_QI`, none twice within a query.
        offsets: int64 [Q + 1]; query q has the relevant items from `offsets[q]` to before the next offset.

    Raises:
        ValueError: k is below one, shapes do not fit, a score is not finite, an item is out of range or twice among a
            query's, or no query has a relevant item.
    """
    _check(k, scores_QI, relevant_R, offsets)
    counts_Q = offsets.diff()
    query_R = _query_of_each(counts_Q)
    above_R, tied_R = _places(scores_QI, relevant_R, offsets)
    ranks = torch.arange(1, scores_QI.shape[1] + 1, dtype=torch.int64, device=scores_QI.device)
    is_retrieved = (ranks <= k).double()
    discounts = is_retrieved / (ranks + 1).double().log2()
    asked = counts_Q > 0
    hits_Q = _gains(is_retrieved, above_R, tied_R, query_R, len(counts_Q))[asked]
    gains_Q = _gains(discounts, above_R, tied_R, query_R, len(counts_Q))[asked]
    largest_Q = _up_to(discounts)[counts_Q[asked]]
    return RankingFigures(
        int(asked.sum()), float((hits_Q / counts_Q[asked]).mean()), float((gains_Q / largest_Q).mean())
    )


def _check(k: int, scores_QI: Tensor, relevant_R: Tensor, offsets: Tensor) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if scores_QI.dim() != 2 or offsets.shape != (len(scores_QI) + 1,):
        raise ValueError(f"expected scores [Q, I] and offsets [Q + 1], got {[*scores_QI.shape]} and {[*offsets.shape]}")
    if int(offsets[0]) != 0 or int(offsets[-1]) != relevant_R.numel() or bool((offsets.diff() < 0).any()):
        raise ValueError(f"expected offsets that rise from 0 to {relevant_R.numel()}, got {offsets.tolist()}")
    if relevant_R.numel() == 0:
        raise ValueError("expected a query with a relevant item, got none")
    if not bool(scores_QI.isfinite().all()):
        raise ValueError(f"the score of query {int((~scores_QI.isfinite()).nonzero()[0, 0])} is not finite for an item")
    _check_items(scores_QI.shape[1], relevant_R, offsets)


def _check_items(num_items: int, relevant_R: Tensor, offsets: Tensor) -> None:
    if int(relevant_R.min()) < 0 or int(relevant_R.max()) >= num_items:
        raise ValueError(
            f"expected relevant items from 0 to before {num_items}, got {int(relevant_R.min())} to "
            f"{int(relevant_R.max())}"
        )
    query_R = _query_of_each(offsets.diff())
    codes_R, times_R = (query_R * num_items + relevant_R).unique(return_counts=True)
    if bool((times_R > 1).any()):
        query, item = divmod(int(codes_R[times_R > 1][0]), num_items)
        raise ValueError(f"item {item} is more than once among the relevant items of query {query}")


def _query_of_each(counts_Q: Tensor) -> Tensor:
    """The query of each relevant item, int64 [R]."""
    queries = torch.arange(counts_Q.numel(), dtype=torch.int64, device=counts_Q.device)
    return torch.repeat_interleave(queries, counts_Q)


def _places(scores_QI: Tensor, relevant_R: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """How many items have higher scores than each relevant one, and how many have equal ones, int64 [R] each."""
    ascending_QI = scores_QI.sort(1).values
    above_R, tied_R = torch.empty_like(relevant_R), torch.empty_like(relevant_R)
    # Searched query by query: a row of scores for each relevant item would need R * I of memory.
    for query, (start, stop) in enumerate(pairwise(offsets.tolist())):
        scores = scores_QI[query, relevant_R[start:stop]]
        up_to, below = (torch.searchsorted(ascending_QI[query], scores, right=right) for right in (True, False))
        above_R[start:stop], tied_R[start:stop] = scores_QI.shape[1] - up_to, up_to - below
    return above_R, tied_R


def _gains(gain_of_rank: Tensor, above_R: Tensor, tied_R: Tensor, query_R: Tensor, queries: int) -> Tensor:
    """The expected sum over each query's relevant items of what their rank gains, float64 [Q]."""
    sums = _up_to(gain_of_rank)
    gains_R = (sums[above_R + tied_R] - sums[above_R]) / tied_R
    return torch.zeros(queries, dtype=torch.float64, device=gains_R.device).index_add(0, query_R, gains_R)


def _up_to(gain_of_rank: Tensor) -> Tensor:
    """The gain of the first n ranks, for n from 0, [I + 1]."""
    return torch.cat([gain_of_rank.new_zeros(1), gain_of_rank.cumsum(0)])


RETRIEVED = 10
"""The k of recall@k and NDCG@k."""

_SCORES_PER_CHUNK = 1 << 22
_ROWS_PER_CHUNK = 8192
_PENDING_ROWS = 1 << 17


@runtime_checkable
class Retriever(Protocol):
    """Gives queries and items vectors, whose products are scores.

    Attributes:
        sides: cuts rows into query and item.
        temperature: what products are divided by.
    """

    sides: QueryItemSplit
    temperature: float

    def query_vectors(self, batch: Batch) -> Tensor:
        """Returns the vectors of rows of the query's fields, [B, D]."""
        ...

    def item_vectors(self, batch: Batch) -> Tensor:
        """Returns the vectors of rows of the item's fields, [B, D]."""
        ...


class DistinctRows:
    """The distinct rows of a stream, by their features; memory holds these and not the stream.

    Attributes:
        keys: int64, rising, one for each row.
    """

    def __init__(self) -> None:
        self.keys = torch.empty(0, dtype=torch.int64, device="cpu")
        self._batches: list[Batch] = []
        self._pending: list[Tensor] = []

    def __len__(self) -> int:
        return self.keys.numel()

    def add(self, batch: Batch) -> Tensor:
        """Takes rows and returns their keys, int64 [B]."""
        keys_B = row_keys(batch)
        keys_C, first_C, _ = first_of_each(keys_B)
        self._batches.append(batch.take(first_C))
        self._pending.append(keys_C)
        # Merged once as much waits as is there: merging every block would sort all rows again for each.
        if sum(map(len, self._pending)) > max(len(self), _PENDING_ROWS):
            self.merge()
        return keys_B

    def merge(self) -> None:
        """Leaves one row of those that are equal."""
        if self._pending:
            keys, first, _ = first_of_each(torch.cat([self.keys, *self._pending]))
            self.keys, order = keys.sort()
            self._batches, self._pending = [concatenate(self._batches).take(first[order])], []

    def rows(self) -> Batch:
        """Returns the rows in the order of `keys`; there must be one."""
        self.merge()
        return self._batches[0]

    def places(self, keys_N: Tensor) -> Tensor:
        """Returns the place of each key, int64 [N].

        Raises:
            ValueError: one is not there.
        """
        self.merge()
        places_N = torch.searchsorted(self.keys, keys_N)
        if not torch.equal(self.keys[places_N.clamp(max=len(self) - 1)], keys_N):
            raise ValueError("rows to evaluate have an item that is not among the candidates")
        return places_N


class Candidates(DistinctRows):
    """The distinct items of rows.

    Args:
        sides: cuts rows into query and item.
        sources: of the rows; each is passed over once.

    Raises:
        ValueError: there are no rows.
    """

    def __init__(self, sides: QueryItemSplit, sources: Iterable[Iterable[Batch]]) -> None:
        super().__init__()
        for block in (block for source in sources for block in source):
            self.add(sides.item(block))
        self.merge()
        if len(self) == 0:
            raise ValueError("no rows to take candidate items from")


@dataclass(frozen=True)
class RankedPart:
    """Rows to evaluate, by query.

    Attributes:
        rows, positives: how many.
        queries: their distinct query sides.
        relevant_R: int64 [R], places among the candidates; each query's are distinct.
        times_R: int64 [R], the positive rows of the pair.
        offsets: int64 [Q + 1]; query q has the pairs from `offsets[q]` to before the next offset.
    """

    rows: int
    positives: int
    queries: Batch
    relevant_R: Tensor
    times_R: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, sides: QueryItemSplit, blocks: Iterable[Batch], candidates: Candidates) -> RankedPart:
        """Passes over the rows once; keeps 16 bytes a positive row meanwhile.

        Raises:
            ValueError: there is no positive row, or one has an item that is no candidate.
        """
        rows, queries = 0, DistinctRows()
        query_keys, item_places = [], []
        for block in blocks:
            rows += len(block)
            positive = block.take((block.labels == 1).nonzero().squeeze(1))
            if len(positive) > 0:
                query_keys.append(queries.add(sides.query(positive)))
                item_places.append(candidates.places(row_keys(sides.item(positive))))
        if not query_keys:
            raise ValueError(f"{rows} rows to evaluate, none of them positive: there is nothing to retrieve")
        query_N, item_N = queries.places(torch.cat(query_keys)), torch.cat(item_places)
        pairs_R, times_R = (query_N * len(candidates) + item_N).unique(return_counts=True)
        counts_Q = (pairs_R // len(candidates)).bincount(minlength=len(queries))
        relevant_R = pairs_R % len(candidates)
        return cls(rows, query_N.numel(), queries.rows(), relevant_R, times_R, offsets_of_lengths(counts_Q))

    def blocks(self, num_candidates: int) -> Iterable[RankedPart]:
        """Yields a few queries at a time, with their pairs."""
        size = max(1, _SCORES_PER_CHUNK // num_candidates)
        for start in range(0, len(self.queries), size):
            offsets = self.offsets[start : start + size + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            yield RankedPart(
                self.rows,
                self.positives,
                self.queries.rows(start, min(start + size, len(self.queries))),
                self.relevant_R[first:last],
                self.times_R[first:last],
                offsets - first,
            )


def evaluate_retrieval(retriever: Retriever, candidates: Candidates, part: RankedPart) -> Evaluation:
    """Ranks all candidates for each query.

    Returns:
        recall@10 and NDCG@10, means over queries; and as logloss the mean over positive rows of -log p(item | query),
        with the softmax of the scores of all candidates as p.

    Raises:
        ValueError: a score is not finite.
    """
    with _evaluating(retriever):
        items_ID = torch.cat([retriever.item_vectors(rows) for rows in _cut(candidates.rows(), _ROWS_PER_CHUNK)])
        recall, ndcg, loss, queries = 0.0, 0.0, 0.0, len(part.queries)
        for block in part.blocks(len(candidates)):
            scores_QI = retriever.query_vectors(block.queries) @ items_ID.T / retriever.temperature
            figures = ranking_at(RETRIEVED, scores_QI, block.relevant_R, block.offsets)
            recall += figures.recall * figures.queries / queries
            ndcg += figures.ndcg * figures.queries / queries
            loss += _loss_sum(scores_QI, block) / part.positives
    return Evaluation(part.rows, part.positives, math.nan, loss, math.nan, recall=recall, ndcg=ndcg)


def _loss_sum(scores_QI: Tensor, block: RankedPart) -> float:
    queries = torch.arange(len(scores_QI), dtype=torch.int64, device=scores_QI.device)
    query_R = torch.repeat_interleave(queries, block.offsets.diff())
    losses_R = scores_QI.logsumexp(1)[query_R] - scores_QI[query_R, block.relevant_R]
    return float((losses_R.double() * block.times_R).sum())


def _cut(batch: Batch, num_rows: int) -> Iterable[Batch]:
    for start in range(0, len(batch), num_rows):
        yield batch.rows(start, min(start + num_rows, len(batch)))


@contextmanager
def _evaluating(retriever: Any) -> Any:
    """Runs the block without gradients, and in evaluation mode if the retriever is a module."""
    was_training = isinstance(retriever, nn.Module) and retriever.training
    if was_training:
        retriever.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            retriever.train()
