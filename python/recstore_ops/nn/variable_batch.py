"""Batches whose features hold equal bags once, each its own number of examples, for lookups of one number for all.

Features are filled up with empty bags to one number of examples, and looked up together. Inverse indices then say
which of its feature's examples each example of the batch stands for.

Shape suffixes: B examples, D dims of all features together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recstore_ops.sparse import KeyedJaggedTensor
from recstore_ops.sparse.keyed_parts import filled_up

# The ids of several features in one request, and a part of them.
#
# Shape suffixes: F features, B examples, N ids.


class Features(NamedTuple):
    """Bags of ids, those of the first feature first.

    Attributes:
        ids_N: int64.
        offsets: `[F * B + 1]`.
        weights_N: the factor of each id.
        rows: the rows of each feature, if they were prefetched.
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


def with_one_stride(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same bags, each feature with empty ones behind up to the number of the largest.

    Raises:
        ValueError: features have different numbers of examples, without inverse indices.
    """
    if not batch.variable_stride_per_key():
        return batch
    strides = batch.stride_per_key()
    if len(set(strides)) > 1 and batch.inverse_indices_or_none() is None:
        raise ValueError(
            f"features with different numbers of examples, {dict(zip(batch.keys(), strides, strict=True))}, need "
            "inverse indices, which say what each example of the batch stands for"
        )
    most = max(strides)
    lengths = filled_up(batch.lengths(), strides, most)
    return KeyedJaggedTensor(batch.keys(), batch.values(), batch.weights_or_none(), lengths, stride=most)


def without_weights(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same bags without weights."""
    return KeyedJaggedTensor(
        batch.keys(),
        batch.values(),
        lengths=batch.lengths(),
        stride_per_key_per_rank=batch.stride_per_key_per_rank() or None,
        inverse_indices=batch.inverse_indices_or_none(),
    )


def expanded(
    pooled_BD: Tensor, dims: list[int], features: list[str], inverse_indices: tuple[list[str], Tensor]
) -> Tensor:
    """Gives each example the result of the one that it stands for among its feature's own examples.

    Args:
        pooled_BD: columns of several features.
        dims: their number for each feature.
        features: the feature of each.
        inverse_indices: of `KeyedJaggedTensor`.

    Raises:
        ValueError: a feature has no inverse indices.
    """
    names, indices = inverse_indices
    missing = [feature for feature in features if feature not in names]
    if missing:
        raise ValueError(f"there are no inverse indices of the features {missing} among {names}")
    parts = zip(features, pooled_BD.split(dims, dim=1), strict=True)
    return torch.cat([part.index_select(0, indices[names.index(feature)]) for feature, part in parts], dim=1)
