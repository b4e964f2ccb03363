"""Checks the inputs of a call against the manifest of a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from recstore_ops.serving.sizes import Range


def check_inputs(
    expected: Sequence[dict[str, Any]], inputs: Sequence[Any], ranges: Mapping[str, Range] | None = None
) -> None:
    """Checks tensors: their number, types, dimensions, and sizes that are fixed, within bounds or equal one another.

    Args:
        expected: the manifest's description of each.
        inputs: in the same order.
        ranges: the bounds of sizes, by their names.

    Raises:
        ValueError: names the input, the expected value and the actual one.
    """
    if len(inputs) != len(expected):
        names = ", ".join(each["name"] for each in expected)
        raise ValueError(f"the bundle takes {len(expected)} tensors, {names}; got {len(inputs)}")
    sizes: dict[str, tuple[int, str]] = {}
    for description, given in zip(expected, inputs, strict=True):
        if "dtype" not in description:
            _check_value(description, given)
            continue
        _check_tensor(description, given)
        for place, (name, size) in enumerate(zip(description["sizes"], given.shape, strict=True)):
            if name is not None:
                bounds = (ranges or {}).get(name)
                if bounds is not None and not bounds.has(size):
                    raise ValueError(
                        f"input {description['name']}: size {size} of dimension {place} must be {bounds}, for which "
                        "the program was exported"
                    )
                first, whose = sizes.setdefault(name, (size, description["name"]))
                if size != first:
                    raise ValueError(
                        f"input {description['name']}: size {size} of dimension {place} must be equal to that of "
                        f"{whose}, {first}"
                    )


def _check_value(description: dict[str, Any], given: Any) -> None:
    if type(given).__name__ != description["type"]:
        raise ValueError(f"input {description['name']}: expected {description['type']}, got {type(given).__name__}")


def _check_tensor(description: dict[str, Any], given: Any) -> None:
    name, dtype, shape = description["name"], description["dtype"], description["shape"]
    if not isinstance(given, Tensor):
        raise ValueError(f"input {name}: expected a tensor, got {type(given).__name__}")
    found = str(given.dtype).removeprefix("torch."), list(given.shape)
    fits = found[0] == dtype and len(found[1]) == len(shape)
    if not fits or any(size not in (-1, own) for size, own in zip(shape, found[1], strict=True)):
        raise ValueError(f"input {name}: expected {dtype} {shape}, got {found[0]} {found[1]}")
