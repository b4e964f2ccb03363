"""Which values a field of a configuration takes: its bounds in its type, as `Annotated[int, Bounds(least=1)]`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

_LARGEST = 2**63 - 1
"""Of the integers that PyTorch and the store take."""


@dataclass(frozen=True)
class Bounds:
    """What a number must be at least, above, at most and below; None bounds nothing.

    With `of_each` the field is a sequence, and these are the bounds of each number in it.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    of_each: bool = False

    def check(self, name: str, number: float) -> None:
        """Refuses a number out of bounds.

        Raises:
            ValueError: names the value and the bound.
        """
        _check_number(name, number)
        for words, bound, is_within in (
            ("at least", self.least, lambda least: number >= least),
            ("above", self.above, lambda above: number > above),
            ("at most", self.most, lambda most: number <= most),
            ("below", self.below, lambda below: number < below),
        ):
            if bound is not None and not is_within(bound):
                raise ValueError(f"{name} must be {words} {bound}, got {number}")


def check_numbers(config: Any) -> None:
    """Checks that all numbers of a configuration are finite, and integers such as 64 bits hold.

    Raises:
        ValueError: one is not.
    """
    for each in fields(config):
        for number in _numbers(getattr(config, each.name)):
            _check_number(each.name, number)


def check_bounds(config: Any) -> None:
    """Checks all numbers of a configuration which are given.

    Raises:
        ValueError: one is out of its bounds.
    """
    for name, bounds in _bounded_fields(type(config)):
        value = getattr(config, name)
        if value is not None:
            for number in value if bounds.of_each else (value,):
                bounds.check(name, number)


def check_choices(config: Any) -> None:
    """Checks all fields of a configuration whose type is `Literal`, if they are given.

    Raises:
        ValueError: one is none of its choices.
    """
    for name, hint in get_type_hints(type(config)).items():
        choices, value = _choices(hint), getattr(config, name)
        is_left_out = value is None and get_origin(hint) is not Literal
        if choices and not is_left_out and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _numbers(value: Any) -> Iterator[float]:
    """Yields a number, or those within lists, tuples and dictionaries."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


def _check_number(name: str, number: float) -> None:
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {number}")
    if isinstance(number, int) and number > _LARGEST:
        raise ValueError(f"{name} must be at most {_LARGEST}, got {number}")
    if isinstance(number, int) and number < -_LARGEST - 1:
        raise ValueError(f"{name} must be at least {-_LARGEST - 1}, got {number}")


def _bounded_fields(configuration: type) -> Iterator[tuple[str, Bounds]]:
    for name, hint in get_type_hints(configuration, include_extras=True).items():
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, Bounds):
                yield name, annotation


def _choices(hint: Any) -> tuple[str, ...]:
    """Returns the choices of `Literal`, or of `Literal | None`."""
    kinds = (hint, *get_args(hint))
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
