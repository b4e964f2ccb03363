"""The check of the ids in a state, by which ids that were averaged or rounded are found.

Programs that average models go over all values of their states: `sum(state[key].float() for state in states) / n`, then
back to the type. Rows are meant so; an id above 2**24 comes back as another one, and so does the mean of two ids.

The check is 32 hexadecimal digits: of a hash of the ids, whatever their order, of their number, and of those digits.
Each is kept as `16 * digit + 8`. A mean of equal checks, even by bfloat16 and truncated, stays within the sixteen
numbers of its digit. So a mean of states with equal ids, if these come out right, still loads.

Shape suffixes: N ids.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_DIGITS_OF_HASH, _DIGITS_OF_COUNT, _DIGITS_OF_BOTH = 16, 12, 4
_PLACES = np.arange(1, _DIGITS_OF_HASH + _DIGITS_OF_COUNT + 1)


def check_of_ids(ids_N: Tensor) -> Tensor:
    """The check of ids, int64 `[32]`."""
    digits = [*_digits(_hash(ids_N), _DIGITS_OF_HASH), *_digits(ids_N.numel(), _DIGITS_OF_COUNT)]
    digits = [*digits, *_digits(_sum_of(digits), _DIGITS_OF_BOTH)]
    return torch.tensor(digits, dtype=torch.int64, device="cpu") * 16 + 8


def are_ids_as_saved(ids_N: Tensor, check: Tensor) -> bool:
    """Whether ids are those that a check was made of, or are another number of ids: a program chose them itself."""
    expected = check_of_ids(ids_N)
    if check.shape != expected.shape:
        return False
    found, own = (check.cpu() // 16).tolist(), (expected // 16).tolist()
    if found == own:
        return True
    count = slice(_DIGITS_OF_HASH, _DIGITS_OF_HASH + _DIGITS_OF_COUNT)
    is_whole = found[count.stop :] == _digits(_sum_of(found[: count.stop]), _DIGITS_OF_BOTH)
    return is_whole and found[count] != own[count]


def _hash(ids_N: Tensor) -> int:
    # A sum of mixed ids, so that rounding up of one and down of another does not cancel, and order says nothing.
    mixed_N = ids_N.contiguous().numpy().view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed_N ^= mixed_N >> np.uint64(32)
    mixed_N *= np.uint64(0xD6E8FEB86659FD93)
    mixed_N ^= mixed_N >> np.uint64(29)
    return int(mixed_N.sum(dtype=np.uint64))


def _digits(number: int, count: int) -> list[int]:
    """The lowest hexadecimal digits of a number, the least significant first."""
    return [number >> 4 * place & 15 for place in range(count)]


def _sum_of(digits: list[int]) -> int:
    return int((np.array(digits) * _PLACES).sum())
