"""Batches of sparse features as containers of tensors: `torch.export` takes them apart by name.

A `KeyedJaggedTensor` of F features and B examples becomes its keys, its values, its lengths as [B, F], and its weights
if it has any; offsets follow from lengths. A batch that is put together again is not checked: the caller may hold
anything in the places of the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recstore_ops.sparse.keyed_parts import strides_tensor
from recstore_ops.sparse.keyed_tensor import KeyedTensor

_JAGGED = ("values", "lengths", "weights")
_COMPUTED = (
    *("_stride", "_stride_per_key_per_rank", "_stride_per_key", "_length_per_key", "_lengths_offset_per_key"),
    *("_offset_per_key", "_index_per_key", "_jt_dict", "_inverse_indices"),
)


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


def _take_apart_keyed_jagged(features: Any) -> tuple[list[Any], Any]:
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return _take_apart_variable(features)
    if getattr(features, "_lengths_BF", None) is None:
        # Once: `torch.export` looks for the very tensors that it saw before.
        features._lengths_BF = features.lengths().reshape(len(features.keys()), features.stride()).T.contiguous()
    return _tensors_of(features, features._lengths_BF), features.keys()


def _put_together_keyed_jagged(leaves: Any, context: Any) -> KeyedJaggedTensor:
    # Not by the constructor, whose checks the placeholders of tracers do not pass.
    features: Any = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
    for name in _COMPUTED:
        setattr(features, name, None)
    if isinstance(context, dict):
        return _put_together_variable(features, leaves, context)
    features._keys = list(context)
    values, features._lengths_BF, *weights = leaves
    lengths = features._lengths_BF
    return _filled(features, [values, lengths.T.reshape(-1) if isinstance(lengths, Tensor) else lengths, *weights])


def _take_apart_variable(features: Any) -> tuple[list[Any], dict[str, Any]]:
    """Lengths stay as they are if features have strides of their own; the strides are numbers of the context."""
    inverse = features.inverse_indices_or_none()
    context = {
        "keys": features.keys(),
        "strides": features.stride_per_key_per_rank() or None,
        "inverse": None if inverse is None else inverse[0],
    }
    tensors = _tensors_of(features, features.lengths())
    return [*tensors, *([] if inverse is None else [inverse[1]])], context


def _put_together_variable(features: Any, leaves: Any, context: dict[str, Any]) -> KeyedJaggedTensor:
    features._keys = list(context["keys"])
    features._stride_per_key_per_rank = strides_tensor(context["strides"])
    tensors = list(leaves)
    if context["inverse"] is not None:
        features._inverse_indices = (list(context["inverse"]), tensors.pop())
    return _filled(features, tensors)


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
    bags._offsets = None
    return bags


def _take_apart_keyed(tensor: KeyedTensor) -> tuple[list[Any], list[Any]]:
    return [tensor.values()], [tensor.keys(), tensor.length_per_key(), tensor.key_dim()]


def _put_together_keyed(leaves: Any, context: list[Any]) -> KeyedTensor:
    tensor: Any = KeyedTensor.__new__(KeyedTensor)
    tensor._offset_per_key = tensor._index_per_key = None
    tensor._keys, tensor._length_per_key, tensor._key_dim = list(context[0]), list(context[1]), context[2]
    (tensor._values,) = leaves
    return tensor


def jt_is_equal(jt_1: JaggedTensor, jt_2: JaggedTensor) -> bool:
    """Whether two features have the same bags and weights, but for what `torch.allclose` lets differ."""
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return _have_equal_bags(jt_1, jt_2)


def kjt_is_equal(kjt_1: KeyedJaggedTensor, kjt_2: KeyedJaggedTensor) -> bool:
    """Whether two batches have the same features in the same order, and these the same bags and weights."""
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    return _told(kjt_1) == _told(kjt_2) and _have_equal_bags(kjt_1, kjt_2)


def _told(kjt: KeyedJaggedTensor) -> tuple[object, ...]:
    """The keys, strides, lengths and offsets of a batch, which it may have been given."""
    return kjt.keys(), kjt.stride(), kjt.stride_per_key(), kjt.length_per_key(), kjt.offset_per_key()


def _have_equal_bags(one: JaggedTensor | KeyedJaggedTensor, other: JaggedTensor | KeyedJaggedTensor) -> bool:
    return (
        _are_close(one.values(), other.values())
        and _are_close(one.weights_or_none(), other.weights_or_none())
        and _are_close(one.lengths().reshape(-1), other.lengths().reshape(-1))
    )


def _are_close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other)


class ComputeKJTToJTDict(nn.Module):
    """Gives the features of a batch by name."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """`KeyedJaggedTensor.to_dict`."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """Joins features to a batch."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """`KeyedJaggedTensor.from_jt_dict`."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)
