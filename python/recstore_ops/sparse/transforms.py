"""Whether a transform of `torch.func` is under way; compiled code, which traces its own, does not look."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.fx
from torch import Tensor


def is_transformed() -> bool:
    """Whether a transform is under way."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()  # type: ignore[attr-defined]


def refuse_symbolic(value: object) -> None:
    """Refuses what `torch.fx.symbolic_trace` gives in place of ids or of a batch.

    Raises:
        TypeError: it is that.
    """
    if isinstance(value, torch.fx.Proxy):
        raise TypeError(
            "torch.fx.symbolic_trace does not go into lookups: trace by a torch.fx.Tracer whose is_leaf_module holds "
            "for modules over tables, or use torch.compile or torch.export"
        )


def is_batched(tensor: Tensor) -> bool:
    """Whether a `vmap` goes over a tensor."""
    return is_transformed() and torch._C._functorch.is_batchedtensor(tensor)  # type: ignore[attr-defined]


@contextmanager
def without_transforms() -> Iterator[None]:
    """Within it operators take and give plain tensors, and no transform sees them."""
    if not is_transformed():
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # Private: not for all imports.

    with temporarily_clear_interpreter_stack():
        yield


def plain(tensor: Tensor) -> Tensor:
    """The tensor that those of transforms stand for, which no `vmap` goes over."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # type: ignore[attr-defined]
        tensor = torch._C._functorch.get_unwrapped(tensor)  # type: ignore[attr-defined]
    return tensor
