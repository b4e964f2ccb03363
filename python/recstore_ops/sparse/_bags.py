"""Lengths and offsets of bags: checked, and each computed from the other.

Bag i holds `values[offsets[i]:offsets[i + 1]]`, `lengths[i]` of them.
"""

import torch
from torch import Tensor

from recstore_ops.sparse.transforms import is_batched


def lengths_and_offsets(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Completes lengths `[B]` or offsets `[B + 1]` to both, of the integer type given.

    That they cover `values` is checked where looking at them is cheap: on the CPU, outside of compiled code.

    Raises:
        TypeError: lengths or offsets of another type than int32 and int64.
        ValueError: neither is given, they are not 1-D, or they do not cut `values` into bags.
        RuntimeError: `torch.func.vmap` goes over them.
    """
    if lengths is None and offsets is None:
        raise ValueError("lengths or offsets must be given")
    _check_integers("lengths", lengths)
    _check_integers("offsets", offsets)
    if offsets is None:
        assert lengths is not None
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])
    if offsets.shape[0] == 0:
        raise ValueError("offsets must hold at least the end of the last bag, got none")
    differences = offsets.diff()
    if lengths is None:
        lengths = differences
    if lengths.shape != differences.shape:
        raise ValueError(f"offsets of {differences.shape[0]} bags do not fit {lengths.shape[0]} lengths")
    if values.is_cpu and not torch.compiler.is_compiling():
        _check_cover(values.shape[0], lengths, offsets, differences)
    return lengths, offsets


def bag_of_each(ids_N: Tensor, offsets: Tensor) -> Tensor:
    """The bag of each id, int64 `[N]`, by offsets `[B + 1]`."""
    bags = torch.arange(offsets.shape[0] - 1, dtype=torch.int64, device=ids_N.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=ids_N.shape[0])


def _check_integers(what: str, tensor: Tensor | None) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{what} must be an int32 or int64 tensor, got {got}")
    if tensor.dim() != 1:
        raise ValueError(f"{what} must be 1-D, got the shape {tuple(tensor.shape)}")
    if is_batched(tensor):
        raise RuntimeError(f"vmap cannot go over the {what} of bags; put the samples into one batch")


def _check_cover(num_values: int, lengths: Tensor, offsets: Tensor, differences: Tensor) -> None:
    if bool((differences < 0).any()):
        bag = int((differences < 0).nonzero()[0])
        raise ValueError(f"no bag has a negative length, got {int(differences[bag])} for bag {bag}")
    if not torch.equal(lengths.to(differences.dtype), differences):
        raise ValueError("lengths and offsets do not agree")
    if int(offsets[0]) != 0 or int(offsets[-1]) != num_values:
        raise ValueError(
            f"the bags must cover the {num_values} values, from 0 on, got {int(offsets[0])} to {int(offsets[-1])}"
        )


def check_values(values: Tensor, weights: Tensor | None) -> None:
    """Checks values `[N, ...]` and their weights `[N, ...]`.

    Raises:
        TypeError: values or weights that are no tensor.
        ValueError: values without a first dimension, or another number of weights.
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"values must be a tensor, got {type(values).__name__}")
    if values.dim() == 0:
        raise ValueError("values must have at least one dimension, got a scalar")
    if weights is None:
        return
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a tensor, got {type(weights).__name__}")
    if weights.shape[:1] != values.shape[:1]:
        raise ValueError(f"expected {values.shape[0]} weights, one a value, got the shape {tuple(weights.shape)}")


def moved(tensor: Tensor | None, device: torch.device | str, non_blocking: bool) -> Tensor | None:
    """Copies a tensor that may be absent to a device."""
    return None if tensor is None else tensor.to(device, non_blocking=non_blocking)
