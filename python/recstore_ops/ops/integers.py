"""Options that are integers, as operators take them: torch itself takes `tensor(3.9)` as 3, and names no option."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Proxy


def as_int64(function: str, name: str, value: Any) -> int:
    """Returns an option as an int; a proxy of `torch.fx`, which stands for one, stays as it is.

    Raises:
        TypeError: no integer.
        ValueError: an integer that is no int64.
    """
    if type(value) is not int:
        if isinstance(value, Proxy):
            return value  # type: ignore[return-value]
        value = _index(function, name, value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{function}: {name} must be an int64, got {value}")
    return value


def _index(function: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}") from None
