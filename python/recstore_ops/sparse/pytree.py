"""Batches of sparse features as containers of tensors: `torch.export` takes them apart by name.

A `KeyedJaggedTensor` of F features and B examples is its values, its lengths as [B, F] and, where it has them, its
weights, beside its keys; offsets follow from lengths. What is put together again is not checked: whoever calls it may
hold anything in the places of the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recstore_ops.sparse.keyed_tensor import KeyedTensor

_JAGGED = ("values", "lengths", "weights")


def register() -> None:
    """Makes the types known to `torch.utils._pytree`."""
    _register(KeyedJaggedTensor, _take_apart_keyed_jagged, _put_together_keyed_jagged)
    _register(JaggedTensor, _take_apart_jagged, _put_together_jagged)
    _register(KeyedTensor, _take_apart_keyed, _put_together_keyed)


def _register(cls: type, take_apart: Any, put_together: Any) -> None:
    def with_keys(value: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        leaves, context = take_apart(value)
        keys: list[Any] = [GetAttrKey(name) for name in _JAGGED]
        return list(zip(keys, leaves, strict=False)), context

    register_pytree_node(
        cls,
        take_apart,
        put_together,
        serialized_type_name=f"recstore_ops.{cls.__name__}",
        flatten_with_keys_fn=with_keys,
    )


def _take_apart_keyed_jagged(features: KeyedJaggedTensor) -> tuple[list[Any], list[str]]:
    if features._lengths_BF is None:  # Once: `torch.export` looks for the very tensors that it saw before.
        features._lengths_BF = features.lengths().view(len(features.keys()), features.stride()).T.contiguous()
    return _tensors_of(features, features._lengths_BF), features.keys()


def _put_together_keyed_jagged(leaves: Any, keys: list[str]) -> KeyedJaggedTensor:
    features = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
    features._keys = list(keys)
    values, features._lengths_BF, *weights = leaves
    lengths = features._lengths_BF
    return _filled(features, [values, lengths.T.reshape(-1) if isinstance(lengths, Tensor) else lengths, *weights])


def _take_apart_jagged(feature: JaggedTensor) -> tuple[list[Any], None]:
    return _tensors_of(feature, feature.lengths()), None


def _put_together_jagged(leaves: Any, _context: None) -> JaggedTensor:
    return _filled(JaggedTensor.__new__(JaggedTensor), leaves)


def _tensors_of(bags: JaggedTensor | KeyedJaggedTensor, lengths: Tensor) -> list[Any]:
    weights = bags.weights_or_none()
    return [bags.values(), lengths, *([] if weights is None else [weights])]


def _filled(bags: Any, leaves: Any) -> Any:
    bags._values, bags._lengths, *weights = leaves
    bags._weights = weights[0] if weights else None
    bags._offsets = _offsets_of(bags._lengths)
    return bags


def _offsets_of(lengths: Any) -> Any:
    if not isinstance(lengths, Tensor):
        return None
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def _take_apart_keyed(tensor: KeyedTensor) -> tuple[list[Any], list[Any]]:
    return [tensor.values()], [tensor.keys(), tensor.length_per_key(), tensor.key_dim()]


def _put_together_keyed(leaves: Any, context: list[Any]) -> KeyedTensor:
    tensor = KeyedTensor.__new__(KeyedTensor)
    tensor._keys, tensor._length_per_key, tensor._key_dim = list(context[0]), list(context[1]), context[2]
    (tensor._values,) = leaves
    return tensor
