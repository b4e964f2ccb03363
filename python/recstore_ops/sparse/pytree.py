"""Batches of sparse features as containers of tensors: `torch.export` takes them apart by name.

A `KeyedJaggedTensor` of F features and B examples is its values, its lengths as [B, F] and, where it has them, its
weights, beside its keys; offsets follow from lengths. What is put together again is not checked: whoever calls it may
hold anything in the places of the tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recstore_ops.sparse.keyed_tensor import KeyedTensor
from recstore_ops.sparse.variable_batch import strides_tensor

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
    """Lengths stay as they are where features have strides of their own; these are numbers of the context."""
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
