"""Operations on all tensors of a batch alike: copies, streams, memory. TorchScript leaves this out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self


class BatchTensors:
    """A batch as the tensors it is made of."""

    _tensors = ("_values", "_weights", "_lengths", "_offsets")
    """The attributes that hold them, each a tensor or `None`."""
    _told_alike: tuple[str, ...] = ()
    """The methods that batches which are copied into each other answer alike."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """A copy on a device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy in memory that a GPU reads without waiting."""
        return self._mapped(torch.Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Notes that work on a stream uses the tensors, so that their memory is kept until it is done."""
        for tensor in self._each_tensor():
            tensor.record_stream(stream)

    def size_in_bytes(self) -> int:
        """The bytes of all tensors that are there; lengths and offsets count once they are computed."""
        return sum(tensor.element_size() * tensor.numel() for tensor in self._each_tensor())

    def clear_storage(self) -> int:
        """Frees the memory of the tensors, also for those that share it; returns the bytes of the tensors."""
        size = self.size_in_bytes()
        for tensor in self._each_tensor():
            tensor.untyped_storage().resize_(0)
        return size

    def copy_(self, other: Any, non_blocking: bool = False) -> Self:
        """Copies the tensors of a batch with equal shapes into those of this one.

        Raises:
            ValueError: other keys, other shapes, or weights of one of both only; then nothing is copied.
        """
        for own, others in self._pairs(other):
            own.copy_(others, non_blocking=non_blocking)
        return self

    def _pairs(self, other: Any) -> list[tuple[Tensor, Tensor]]:
        """The tensors of this batch, each with that of the other which is to be copied into it."""
        for name in self._told_alike:
            own, others = getattr(self, name)(), getattr(other, name)()
            if own != others:
                raise ValueError(f"copy_ needs the {name} {own}, got {others}")
        pairs: list[tuple[Tensor, Tensor]] = []
        for name in self._tensors:
            own, others = getattr(self, name), getattr(other, name)
            if name in ("_lengths", "_offsets"):  # The other was given either.
                others = None if own is None else getattr(other, name.removeprefix("_"))()
            pairs += pair_of(name.removeprefix("_"), own, others)
        return pairs

    def _not_filled(self, device: torch.device) -> Self:
        return self._mapped(lambda tensor: torch.empty_like(tensor, device=device))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        made = copy.copy(self)
        for name in self._tensors:
            tensor = getattr(self, name)
            setattr(made, name, None if tensor is None else function(tensor))
        return made

    def _each_tensor(self) -> Iterator[Tensor]:
        for name in self._tensors:
            tensor = getattr(self, name)
            if tensor is not None:
                yield tensor


def pair_of(name: str, own: Tensor | None, others: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """A tensor beside the one of its shape that is copied into it, or nothing if neither batch has one.

    Raises:
        ValueError: only one of both batches has it, or their shapes differ.
    """
    if own is None and others is None:
        return []
    if own is None or others is None:
        raise ValueError(
            f"copy_ needs {name} in both batches or in none, {'this' if own is None else 'the other'} has none"
        )
    if own.shape != others.shape:
        raise ValueError(f"copy_ needs {name} of the shape {tuple(own.shape)}, got {tuple(others.shape)}")
    return [(own, others)]


def bags_text(values: Tensor, bounds: list[int]) -> str:
    """Bags that start and end at these bounds."""
    return str([values[start:end].tolist() for start, end in pairwise(bounds)])


def jagged_text(values: Tensor, weights: Tensor | None, bounds: list[int], indent: str) -> str:
    """The bags of a feature, or their values and weights, each on a line of its own."""
    if weights is None:
        return bags_text(values, bounds)
    parts = {"values": bags_text(values, bounds), "weights": bags_text(weights, bounds)}
    return ",\n".join(f'{indent}"{name}": {text}' for name, text in parts.items())


def block(kind: str, lines: Iterable[str]) -> str:
    """The printed form of a batch of a kind."""
    return f"{kind}({{\n" + ",\n".join(lines) + "\n})\n"


def keyed_block(kind: str, parts: Iterable[tuple[str, str]]) -> str:
    """The same of parts with names, which may come twice."""
    lines = [f'    "{key}": {text}' for key, text in parts]
    return block(kind, lines) if lines else f"{kind}()\n"
