"""The ids of several features in one request, and a part of them.

Shape suffixes: F features, B examples, N ids.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Features(NamedTuple):
    """Bags of ids, those of the first feature first.

    Attributes:
        ids_N: int64.
        offsets: `[F * B + 1]`.
        weights_N: the factor of each id.
        rows: those of each feature, where they were prefetched.
    """

    ids_N: Tensor
    offsets: Tensor
    weights_N: Tensor | None
    rows: list[Tensor] | None


def features_at(features: Features, places: Sequence[int], num_features: int) -> Features:
    """Some of the features, by their places."""
    lengths_FB = features.offsets.diff().view(num_features, -1)
    sizes = lengths_FB.sum(1).tolist()

    def cut(values_N: Tensor) -> Tensor:
        parts = values_N.split(sizes)
        return torch.cat([parts[place] for place in places])

    lengths = torch.cat([lengths_FB[place] for place in places])
    return Features(
        cut(features.ids_N),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        None if features.weights_N is None else cut(features.weights_N),
        None if features.rows is None else [features.rows[place] for place in places],
    )
