"""Weighted means of bags: `sum(w * x) / sum(w)` over the ids that a bag counts.

The sums come with gradients for rows and weights. This module divides them, which adds the rest of the weights'
gradient.

Shape suffixes: N ids, B bags, D dim.
"""

import torch
from torch import Tensor


def sums_of_weights(bag_N: Tensor, bags: int, weights_N: Tensor, counted_N: Tensor | None = None) -> Tensor:
    """The sum of the weights of each bag, `[B]`, added in the order of the ids.

    Args:
        bag_N: the bag of each id.
        bags: B.
        weights_N: float32.
        counted_N: bool: whether each id counts; `None` for all.
    """
    if counted_N is not None:
        weights_N = torch.where(counted_N, weights_N, 0.0)
    return weights_N.new_zeros(bags).index_add(0, bag_N, weights_N)


def divided_by_weights(sums: Tensor, weights: Tensor) -> Tensor:
    """Divides weighted sums by the sums of their weights; a zero sum of weights gives zero, without a gradient."""
    is_empty = weights == 0
    # Two `where`s: a division by zero in the branch that is not taken would still give NaN as its gradient.
    return torch.where(is_empty, 0.0, sums / torch.where(is_empty, 1.0, weights))
