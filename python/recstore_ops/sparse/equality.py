"""Whether batches hold the same."""

import torch
from torch import Tensor

from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.keyed_jagged_tensor import KeyedJaggedTensor


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
    """What a batch says of its features, which it may have been given."""
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
