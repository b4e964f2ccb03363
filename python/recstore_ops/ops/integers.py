"""Integers as operators take them: torch itself takes `tensor(3.9)` as 3 and `True` as 1, and names no option."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Proxy


def as_int64(function: str, name: str, value: Any) -> int:
    """Returns an option as an int; a proxy of `torch.fx`, which stands for one, stays as it is.

    Raises:
        TypeError: no integer.
        ValueError: an integer that is no int64.
    """
    if isinstance(value, Proxy):
        return value  # type: ignore[return-value]
    value = as_int(f"{function}: {name} must be an integer", value)
    if not is_int64(value):
        raise ValueError(f"{function}: {name} must be an int64, got {value}")
    return value


def as_int(rule: str, value: Any) -> int:
    """Returns an integer of any type as an int.

    Args:
        rule: what the message says that it must be.
        value: an int, or an integer of numpy or torch.

    Raises:
        TypeError: no integer; truth values are none.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        raise TypeError(f"{rule}, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{rule}, got {value!r}") from None


def is_int64(value: int) -> bool:
    """Whether int64 has an integer."""
    return -(2**63) <= value < 2**63
