"""Takes TorchRec's batches beside our own, and answers in kind."""

from typing import TYPE_CHECKING, Any

from recstore_ops import sparse
from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recstore_ops.sparse.transforms import refuse_symbolic

# What takes and gives batches of either package, which have no type in common. TorchScript takes and gives ours.
if TYPE_CHECKING:
    Batch = Feature = Any
else:
    Batch, Feature = KeyedJaggedTensor, JaggedTensor


def own_batch(features: Any) -> KeyedJaggedTensor:
    """Returns a batch of TorchRec, or of the same interface, as our own over the same tensors.

    Raises:
        TypeError: something else.
    """
    if isinstance(features, KeyedJaggedTensor):
        return features
    refuse_symbolic(features)
    interface = ("keys", "values", "offsets", "weights_or_none")
    if not all(hasattr(features, method) for method in interface):
        raise TypeError(f"features must be a KeyedJaggedTensor, got {type(features).__name__}")
    strides = features.stride_per_key_per_rank() if getattr(features, "variable_stride_per_key", bool)() else None
    inverse_indices = features.inverse_indices_or_none() if hasattr(features, "inverse_indices_or_none") else None
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        features.weights_or_none(),
        offsets=features.offsets(),
        stride_per_key_per_rank=strides,
        inverse_indices=inverse_indices,
    )


def type_beside(features: Any, name: str) -> Any:
    """The type `name`, `KeyedTensor` or `JaggedTensor`, of TorchRec for its batches and our own for all others."""
    if any(base.__module__.startswith("torchrec.") for base in type(features).__mro__):
        from torchrec.sparse import jagged_tensor  # type: ignore[import-not-found]

        return getattr(jagged_tensor, name)
    return getattr(sparse, name)
