"""Numbers as integers in the same order, for rows whose group is a number with fractions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recstore_ops.training.data.batch import NO_GROUP

_ALL_BUT_SIGN = np.int64(2**63 - 1)


def keys_of_numbers(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns an integer for each number [N], in the order of the numbers; `NO_GROUP` for NaN."""
    # Negative numbers count backwards in their bits. Zeros of both signs are one.
    keys = _turned((numbers + 0.0).view(np.int64))
    return np.where(np.isnan(numbers), NO_GROUP, keys)


def numbers_of_keys(keys: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the numbers [N] that `keys_of_numbers` was given."""
    return _turned(keys).view(np.float64)


def _turned(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    return bits ^ ((bits >> 63) & _ALL_BUT_SIGN)
