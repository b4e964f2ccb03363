"""Bags from and to dense tensors. TorchScript compiles this but for `check_integer`.

Shape suffixes: N values, B bags, L longest bag.
"""

import torch
from torch import Tensor


def check_integer(name: str, value: object) -> None:
    """Refuses what is no integer, neither Python's nor one of a tensor.

    Raises:
        TypeError: it is that.
    """
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def lengths_of_each(values: list[Tensor]) -> Tensor:
    """The number of values of each bag, int32 `[B]`."""
    device = values[0].device
    return torch.tensor([value.shape[0] for value in values], dtype=torch.int32, device=device)


def within_lengths(size: int, lengths: Tensor) -> Tensor:
    """Which places of `[B, size]` bags of these lengths fill, bool."""
    place_L = torch.arange(size, dtype=torch.int64, device=lengths.device)
    return place_L.unsqueeze(0) < lengths.unsqueeze(1)


def masked(values: Tensor | None, is_taken: Tensor) -> Tensor | None:
    """The values that are taken, where there are any."""
    return None if values is None else values[is_taken]


def cut(values: Tensor, offsets: Tensor) -> list[Tensor]:
    """The values of each bag."""
    bounds: list[int] = offsets.to(torch.int64).tolist()
    return [values[bounds[bag] : bounds[bag + 1]] for bag in range(len(bounds) - 1)]


def padded(values: Tensor, offsets: Tensor, length: int, padding_value: float) -> Tensor:
    """Bags as the rows of one tensor, `[B, length, ...]`: longer ones cut, shorter ones filled up."""
    if padding_value % 1 != 0 and not (values.is_floating_point() or values.is_complex()):
        raise ValueError(f"padding_value must be a whole number for values of {values.dtype}, got {padding_value}")
    place_L = torch.arange(length, dtype=torch.int64, device=offsets.device)
    is_filled_BL = place_L.unsqueeze(0) < offsets.diff().unsqueeze(1)
    place_BL = torch.where(is_filled_BL, offsets[:-1].unsqueeze(1) + place_L, values.shape[0])
    sizes = list(values.shape)
    sizes[0] = 1
    padding = values.new_full(sizes, padding_value)
    return torch.cat([values, padding])[place_BL]
