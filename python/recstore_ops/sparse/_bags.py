"""Lengths and offsets of bags: checked, and each computed from the other.

Bag i holds `values[offsets[i]:offsets[i + 1]]`, `lengths[i]` of them. TorchScript compiles the functions that
`JaggedTensor` and `KeyedJaggedTensor` call here, so they are written in the part of Python that it understands.
"""

import torch
from torch import Tensor

from recstore_ops.sparse.transforms import is_batched, is_transformed


def lengths_of(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """The lengths, computed from offsets if there are none."""
    if lengths is not None:
        return lengths
    assert offsets is not None
    return offsets.diff()


def offsets_of(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """The offsets, computed from lengths if there are none."""
    if offsets is not None:
        return offsets
    assert lengths is not None
    return complete_sums(lengths)


def complete_sums(lengths: Tensor) -> Tensor:
    """The start of each bag of these lengths, and the end of the last one, of the same type."""
    # torch sums int32 up as int64, and offsets have the type of the lengths.
    ends = lengths.reshape(-1).cumsum(0).to(lengths.dtype)
    return torch.cat([lengths.new_zeros(1), ends])


def bounds_of(sizes: list[int]) -> list[int]:
    """The start of each part of these sizes, and the end of the last one."""
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def may_keep() -> bool:
    """Whether a batch may cache values it computes: not if a graph, a transform or inference mode owns them."""
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        return True
    else:
        return not (
            torch.compiler.is_compiling()
            or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
            or torch.is_inference_mode_enabled()
            or is_transformed()
        )


def bag_of_each(ids_N: Tensor, offsets: Tensor) -> Tensor:
    """The bag of each id, int64 `[N]`, by offsets `[B + 1]`."""
    bags = torch.arange(offsets.shape[0] - 1, dtype=torch.int64, device=ids_N.device)
    # The size is known. Without it a device would be waited for, and a graph would have a size that depends on data.
    return torch.repeat_interleave(bags, offsets.diff(), output_size=ids_N.shape[0])


def check_bags(values: Tensor, lengths: Tensor | None, offsets: Tensor | None, most_dims: int = 1) -> None:
    """Checks lengths `[B]`, or offsets `[B + 1]`, or both, of bags of values; their numbers only if that is cheap.

    Values behind the last bag belong to none.

    Raises:
        TypeError: lengths or offsets of another type than int32 and int64.
        ValueError: neither is given, they have more than `most_dims` dimensions, or they do not cut `values` into bags.
        RuntimeError: `torch.func.vmap` goes over them.
    """
    if lengths is None and offsets is None:
        raise ValueError("lengths or offsets must be given")
    _check_integers("lengths", lengths, most_dims)
    _check_integers("offsets", offsets, 1)
    if lengths is not None and offsets is not None and lengths.numel() != max(offsets.shape[0] - 1, 0):
        raise ValueError(f"offsets of {max(offsets.shape[0] - 1, 0)} bags do not fit {lengths.numel()} lengths")
    if values.is_cpu and not torch.compiler.is_compiling():
        _check_numbers(values.shape[0], lengths, offsets)


def _check_integers(what: str, tensor: Tensor | None, most_dims: int) -> None:
    if tensor is None:
        return
    # `torch.tensor([])` is float32, and a batch without bags may be written so.
    is_none_of_any_type = isinstance(tensor, Tensor) and not torch.compiler.is_compiling() and tensor.numel() == 0
    if not isinstance(tensor, Tensor) or not (is_none_of_any_type or tensor.dtype in (torch.int32, torch.int64)):
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{what} must be an int32 or int64 tensor, got {got}")
    if not 1 <= tensor.dim() <= most_dims:
        dims = "1-D" if most_dims == 1 else "1-D or 2-D"
        raise ValueError(f"{what} must be {dims}, got the shape {tuple(tensor.shape)}")
    if is_batched(tensor):
        raise RuntimeError(f"vmap cannot go over the {what} of bags; put the samples into one batch")


def _check_numbers(num_values: int, lengths: Tensor | None, offsets: Tensor | None) -> None:
    found = lengths_of(lengths, offsets).reshape(-1)
    if bool((found < 0).any()):
        bag = int((found < 0).nonzero()[0])
        raise ValueError(f"no bag has a negative length, got {int(found[bag])} for bag {bag}")
    start, end = 0, int(found.sum())
    if offsets is not None and offsets.numel():
        if not torch.equal(found.to(offsets.dtype), offsets.diff()):
            raise ValueError("lengths and offsets do not agree")
        start, end = int(offsets[0]), int(offsets[-1])
    if start != 0 or end > num_values:
        raise ValueError(f"the bags must lie within the {num_values} values, from 0 on, got {start} to {end}")


def check_cover(num_values: int, num_in_bags: int) -> None:
    """Checks that every value belongs to a bag, which compiled code takes for granted.

    Raises:
        ValueError: there are values behind the last bag.
    """
    if not torch.compiler.is_compiling() and num_values != num_in_bags:
        raise ValueError(f"the bags must cover the {num_values} values, from 0 on, got 0 to {num_in_bags}")


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
