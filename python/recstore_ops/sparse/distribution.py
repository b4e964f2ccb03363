"""The tensors of a batch that ranks send each other, and the batch that a rank makes of those it received.

Each rank sends every other rank the features that the receiver owns. Parts arrive rank by rank, and within a rank
feature by feature; `recat` is the order of the parts that sorts them by feature.

Shape suffixes: F features, R ranks.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recstore_ops.sparse._bags import bounds_of, complete_sums
from recstore_ops.sparse.keyed_parts import reordered


class Arrived(NamedTuple):
    """The parts of a batch, feature by feature.

    Attributes:
        lengths: of the bags.
        values: of the bags.
        weights: of the values, if there are any.
        strides_FR: of each feature and rank, if these differ.
    """

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    strides_FR: Tensor | None


def sums_of_splits(numbers: Sequence[int], splits: Sequence[int]) -> list[int]:
    """The sum of the first `splits[0]` numbers, of the next `splits[1]`, and so on."""
    bounds = [0, *accumulate(splits)]
    return [sum(numbers[start : start + count]) for start, count in zip(bounds, splits, strict=False)]


def arrived_of_equal_features(tensors: Sequence[Tensor], recat: Tensor | None, strides_R: Sequence[int]) -> Arrived:
    """Puts in order the tensors that ranks sent of features with one stride on each rank.

    Args:
        tensors: lengths, values and, if there are any, weights.
        recat: the places of the parts, each the lengths of a feature and a rank. If ranks have different strides: the
            places of the single lengths.
        strides_R: the examples of each rank.
    """
    lengths, values = tensors[0].reshape(-1), tensors[1]
    weights = tensors[2] if len(tensors) > 2 else None
    if recat is None or not lengths.numel():
        return Arrived(lengths, values, weights, None)
    size = strides_R[0] if len(set(strides_R)) == 1 else 1
    sizes = [size] * (lengths.shape[0] // size)
    return _in_order(lengths, values, weights, sizes, recat, None)


def arrived_of_variable_batch(
    tensors: Sequence[Tensor], recat: Tensor | None, num_features: int, num_ranks: int, stagger: int
) -> Arrived:
    """Puts in order the tensors that ranks sent of features with strides of their own.

    Args:
        tensors: lengths, values, the strides of each rank's features, and, if there are any, weights.
        recat: the places of the parts, each a feature of a rank.
        num_features: F.
        num_ranks: R.
        stagger: the number of ranks of a host, if they alternate with the ranks of other hosts; else 1.
    """
    lengths, values, strides = tensors[:3]
    weights = tensors[3] if len(tensors) > 3 else None
    strides_FR = strides.reshape(num_ranks, num_features).T.cpu()
    if stagger > 1:
        strides_FR = strides_FR[
            :, torch.arange(num_ranks, dtype=torch.int64, device="cpu").view(stagger, -1).T.reshape(-1)
        ]
    if not strides_FR.numel():
        strides_FR = torch.zeros(num_features, 1, dtype=torch.int64, device="cpu")
    if recat is None:
        return Arrived(lengths, values, weights, strides_FR)
    return _in_order(lengths, values, weights, strides.tolist(), recat, strides_FR)


def _in_order(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    sizes: list[int],
    recat: Tensor,
    strides_FR: Tensor | None,
) -> Arrived:
    order, bag_bounds = recat.tolist(), bounds_of(sizes)
    bounds = complete_sums(lengths)[bag_bounds].tolist()
    return Arrived(
        reordered(lengths, bag_bounds, order),
        reordered(values, bounds, order),
        None if weights is None else reordered(weights, bounds, order),
        strides_FR,
    )
