"""The finalizer of splitmix64: a bijection of 64 bits that spreads near numbers over all of them.

Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of variant 13 of Stafford.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def splitmix64(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the first output of splitmix64 for each number (any shape, contiguous) as its state."""
    z = numbers.view(np.uint64) + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _FIRST_FACTOR
    z = (z ^ (z >> np.uint64(27))) * _SECOND_FACTOR
    return z ^ (z >> np.uint64(31))
