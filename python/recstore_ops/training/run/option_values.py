"""How `recstore train` reads what a user writes, given the option's name for errors, and the bounds of numbers."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from recstore_ops.training.data.schema import Role, read_role

_LARGEST = 2**63 - 1
"""The largest integer that PyTorch and the store take."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number: at least, above, at most, below; None for no bound.

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


_MEBIBYTE = 2**20
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_integers(name: str, text: str) -> tuple[int, ...]:
    """Reads whole numbers, as `64,32`.

    Raises:
        ValueError: it is none.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{name} takes whole numbers separated by commas, got {text!r}") from None


def read_bytes(name: str, text: str) -> int:
    """Reads a number of bytes, as `4GB` or `512MiB`.

    Raises:
        ValueError: it is none.
    """
    number = text.rstrip(string.ascii_letters + " ")
    unit = text[len(number) :].strip().upper()
    try:
        return int(float(number) * _BYTES[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{name} takes bytes, as 4GB or 512MiB, got {text!r}") from None


def read_duration(name: str, text: str) -> float:
    """Reads a length of time in seconds, as `7d`, `12h`, `30m` or `90s`.

    Raises:
        ValueError: it is none.
    """
    try:
        return float(text[:-1]) * _SECONDS[text[-1:]]
    except (ValueError, KeyError):
        raise ValueError(f"{name} takes a length of time, as 7d, 12h, 30m or 90s, got {text!r}") from None


def read_mebibytes(_: str, mebibytes: int) -> int:
    """Returns bytes."""
    return mebibytes * _MEBIBYTE


def read_path(_: str, path: Path) -> str:
    """Returns the path as text."""
    return str(path)


def read_names(_: str, names: list[str]) -> tuple[str, ...]:
    """Returns all values of a repeated option."""
    return tuple(names)


def read_roles(name: str, texts: list[str]) -> dict[str, str]:
    """Reads the roles of columns, as `price=number`; of sequences with a target too, as `clicked=sequence:item`.

    Raises:
        ValueError: one has no `=`, no such role, or a column comes twice.
    """
    roles: dict[str, str] = {}
    for text in texts:
        column, equals, role = text.rpartition("=")
        try:
            read_role(role if equals else "")
        except ValueError:
            raise ValueError(f"{name} takes name=role with one of {', '.join(get_args(Role))}, got {text!r}") from None
        if column in roles:
            raise ValueError(f"{name} gives column {column!r} two roles, {roles[column]} and {role}")
        roles[column] = role
    return roles


def read_turned_off(_: str, is_given: bool) -> bool | None:
    """Returns the field of an option that turns off what only some models have; None leaves it to the model."""
    return False if is_given else None


def read_negated(_: str, is_given: bool) -> bool:
    """Returns the field of an option that turns it off, as `--no-bias`."""
    return not is_given


def read_crosses(name: str, texts: list[str]) -> tuple[tuple[int, int], ...]:
    """Reads pairs of fields, as `0,1`.

    Raises:
        ValueError: one is no pair.
    """
    return tuple(_cross(name, text) for text in texts)


def _cross(name: str, text: str) -> tuple[int, int]:
    numbers = read_integers(name, text)
    if len(numbers) != 2:
        raise ValueError(f"{name} takes two fields separated by a comma, got {text!r}")
    return numbers[0], numbers[1]


def read_sequences(name: str, texts: list[str]) -> tuple[tuple[str, str], ...]:
    """Reads histories and their targets, as `clicked=item`.

    Raises:
        ValueError: one has no `=`, or a side of it is empty.
    """
    return tuple(_sequence(name, text) for text in texts)


def _sequence(name: str, text: str) -> tuple[str, str]:
    history, _, target = (part.strip() for part in text.partition("="))
    if not history or not target:
        raise ValueError(f"{name} takes HISTORY=TARGET, names of two fields, got {text!r}")
    return history, target


def read_arguments(name: str, texts: list[str]) -> dict[str, Any]:
    """Reads arguments, as `weight_decay=0.01`.

    Raises:
        ValueError: one has no `=`, or comes twice.
    """
    arguments: dict[str, Any] = {}
    for argument, value in (_argument(name, text) for text in texts):
        if argument in arguments:
            raise ValueError(f"{name} gives {argument} twice, {arguments[argument]} and {value}")
        arguments[argument] = value
    return arguments


def _argument(name: str, text: str) -> tuple[str, Any]:
    argument, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{name} takes name=value, got {text!r}")
    return argument.strip(), _literal(value.strip())


def _literal(text: str) -> Any:
    """Reads a number, a truth value or a list of them; anything else is text."""
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value
