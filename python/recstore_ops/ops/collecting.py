"""Gradients on their way to a collector: who sums those of duplicate ids, and how one backward pass hands its own over.

Shape suffixes: N ids, D dim, U distinct ids.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from recstore_ops.ops import operators

_merge_kind: Literal["python", "native"] = "native"


def set_merge(kind: Literal["python", "native"]) -> None:
    """Chooses who sums the gradients of duplicate ids; both give the same bits.

    Args:
        kind: `native`, the default: the collector, and `torch.ops.recstore.merge_gradients` for `merge_gradients`;
            `python`: `torch.unique` and `index_add_`, before the collector.

    Raises:
        ValueError: another kind.
    """
    global _merge_kind
    if kind not in ("python", "native"):
        raise ValueError(f'set_merge takes "python" or "native", got {kind!r}')
    _merge_kind = kind


def merge_gradients(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the gradients of duplicate ids, in input order.

    Args:
        ids: int64, `[N]`.
        grads: float32, `[N, D]`.

    Returns:
        The distinct ids in ascending order, `[U]`, and their sums, `[U, D]`.
    """
    if _merge_kind == "native":
        return operators.merge_gradients(ids, grads)
    unique_U, inverse_N = torch.unique(ids, return_inverse=True)
    sums_UD = grads.new_zeros((unique_U.shape[0], grads.shape[1]))
    return unique_U, sums_UD.index_add_(0, inverse_N, grads)


def unshared(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one whose memory numpy or another process has too: it may change unseen by torch.

    Torch makes the storage of such a tensor one that cannot be resized. Graphs copy for themselves.
    """
    if torch.compiler.is_compiling() or tensor.untyped_storage().resizable():
        return tensor
    return tensor.clone()


hooked: dict[int, Callable[[], Callable[[Tensor], Tensor] | None]] = {}
"""A weak reference for each collector with hooks, by its number: to the function that gives another one in its place,
which gets the gradients of the pass under way."""


def begin_pass(collectors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the collectors for the gradients that a backward pass hands over: these, or others for hooks."""
    return [_behind_hooks(collector) for collector in collectors] if hooked else [*collectors]


def _behind_hooks(collector: Tensor) -> Tensor:
    reference = hooked.get(int(collector))
    begin = None if reference is None else reference()
    return collector if begin is None else begin(collector)


def collect(
    collector: Tensor,
    table: Tensor,
    ids: Tensor,
    grads: Tensor,
    padding_idx: int | None,
    places: Tensor | None = None,
) -> None:
    """Hands the gradients of one backward pass to a collector.

    The collector keeps ids and gradients as they are, without a copy, until the step sums those of equal ids. If torch
    changes them in place before that, the step raises. Tensors that share memory with numpy are copied. In a traced
    graph all are copied, since it uses the memory again. With `set_merge("python")` they are summed before, except in a
    traced graph, which does not know the number of distinct ids.

    Args:
        collector: the collector's handle.
        table: the table's handle.
        ids: `[...]`.
        grads: `[..., D]`.
        padding_idx: an id whose gradients do not count.
        places: the places from the lookup of the same ids, which spare the step its search.
    """
    if hooked:
        [collector] = begin_pass([collector])
    if merges_here():
        grads_ND = grads.reshape(ids.numel(), grads.shape[-1]).to(torch.float32)
        ids, grads = merge_gradients(ids.reshape(-1), grads_ND)
        places = None
    keep = not torch.compiler.is_compiling()
    operators.accept_grad(collector, table, unshared(ids), unshared(grads), padding_idx, places, keep)


def merges_here() -> bool:
    """Whether gradients are summed before the collector gets them; never in a traced graph."""
    return _merge_kind == "python" and not torch.compiler.is_compiling()
