"""Batches whose features hold equal bags once, each its own number of examples, for lookups of one number for all.

Features are filled up with empty bags to one number of examples, and looked up together. Inverse indices then say
which of its feature's examples each example of the batch stands for.

Shape suffixes: B examples, D dims of all features together.
"""

import torch
from torch import Tensor

from recstore_ops.sparse import KeyedJaggedTensor
from recstore_ops.sparse.variable_batch import filled_up


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
    """What each example gets of what its feature's own examples got.

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
