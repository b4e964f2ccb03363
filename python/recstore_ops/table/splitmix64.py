"""The finalizer of splitmix64: a bijection of 64 bits that spreads near numbers over all of them.

Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of variant 13 of Stafford.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def splitmix64(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the first output of splitmix64 for each number (any shape, contiguous) as its state."""
    z = numbers.view(np.uint64) + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _FIRST_FACTOR
    z = (z ^ (z >> np.uint64(27))) * _SECOND_FACTOR
    return z ^ (z >> np.uint64(31))


def splitmix64_of(numbers: Tensor) -> Tensor:
    """Returns the same of int64 numbers as operators of torch, which an exported program keeps: int64, any shape."""
    gamma, first, second = (int(factor.astype(np.int64)) for factor in (_GAMMA, _FIRST_FACTOR, _SECOND_FACTOR))
    z = numbers + gamma
    z = (z ^ _shifted(z, 30)) * first
    z = (z ^ _shifted(z, 27)) * second
    return z ^ _shifted(z, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """The shift of unsigned numbers: zeros come in from the left."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
