"""Whether a transform of `torch.func` is under way; compiled code, which traces its own, does not look."""

import torch
from torch import Tensor


def is_transformed() -> bool:
    """Whether a transform is under way."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()  # type: ignore[attr-defined]


def is_batched(tensor: Tensor) -> bool:
    """Whether a `vmap` goes over a tensor."""
    return is_transformed() and torch._C._functorch.is_batchedtensor(tensor)  # type: ignore[attr-defined]
