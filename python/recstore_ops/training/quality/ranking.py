"""The two figures of retrieval: recall@k and NDCG@k of scores over all items.

Items with equal scores are in any order with equal probability, and the figures are the expectations over these orders.
So they depend on no order of the items, and equal scores for all items gain nothing.

Shapes: Q queries, I items, R relevant items of all queries together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


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
