"""Functions on sizes, which exported programs call between operators. Integers have 64 bits, as sizes of torch have."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_MIN, _MAX = -(1 << 63), (1 << 63) - 1

Function = Callable[..., Any]


def _in_bounds(function: Function) -> Function:
    """A function whose integers must fit into 64 bits."""

    @wraps(function)
    def bounded(*operands: Any) -> Any:
        try:
            result = function(*operands)
        except (ArithmeticError, ValueError) as error:
            raise ValueError(f"{function.__name__} of {', '.join(map(str, operands))}: {error}") from None
        if type(result) is int and not _MIN <= result <= _MAX:
            raise ValueError(f"{function.__name__} of {', '.join(map(str, operands))} is beyond 64 bits")
        return result

    return bounded


def _getitem(container: Any, place: int) -> Any:
    try:
        return container[place]
    except IndexError:
        raise ValueError(f"getitem of place {place}: the operator gave {len(container)}") from None


def _sym_not(value: Any) -> bool:
    return not value  # `torch.sym_not` imports sympy first, which takes longer than a bundle takes to open.


_OF_NUMBERS = {
    "operator": {
        **dict.fromkeys(("add", "sub", "mul", "floordiv", "truediv", "mod"), 2),
        **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), 2),
        "neg": 1,
    },
    "torch": {"sym_max": 2, "sym_min": 2, "sym_not": 1, "sym_int": 1, "sym_float": 1},
}
"""How many numbers each takes, by module."""

GETITEM = "operator.getitem"

OPERANDS = {f"{module}.{name}": count for module, each in _OF_NUMBERS.items() for name, count in each.items()}
"""How many numbers each function on numbers takes, by the names that graphs use."""

_MODULES = {"operator": operator, "torch": torch}

FUNCTIONS: dict[str, Function] = {
    **{
        f"{module}.{name}": _in_bounds(getattr(_MODULES[module], name))
        for module, each in _OF_NUMBERS.items()
        for name in each
    },
    "torch.sym_not": _in_bounds(_sym_not),
    GETITEM: _getitem,
}
"""All of them, by the names that graphs use."""

ORIGINALS: dict[Any, str] = {
    **{getattr(_MODULES[module], name): f"{module}.{name}" for module, each in _OF_NUMBERS.items() for name in each},
    operator.getitem: GETITEM,
}
"""The names that graphs use, by the functions that exported programs call."""
