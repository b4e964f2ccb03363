"""A keyed batch taken apart; TorchScript compiles it."""

import torch
from torch import Tensor

from recstore_ops.sparse.jagged_tensor import JaggedTensor


def taken_apart(
    keys: list[str], values: Tensor, weights: Tensor | None, lengths: Tensor, sizes: list[int], bounds: list[int]
) -> dict[str, JaggedTensor]:
    """The features of a batch by name.

    Args:
        keys: the names of the F features.
        values: `[N]`, weights: `[N]`.
        lengths: of all bags, `[F * B]`.
        sizes: how many of the values each feature has.
        bounds: where the bags of each feature start, and the end of the last one.
    """
    values_of = torch.split(values, sizes)
    weights_of = torch.split(values if weights is None else weights, sizes)
    features: dict[str, JaggedTensor] = {}
    for index, key in enumerate(keys):
        features[key] = JaggedTensor(
            values_of[index],
            None if weights is None else weights_of[index],
            lengths[bounds[index] : bounds[index + 1]],
            None,
        )
    return features
