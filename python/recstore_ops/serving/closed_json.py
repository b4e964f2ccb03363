"""JSON from a file that others wrote: parsed by the letter, and taken as values of expected types."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NoReturn, TypeVar

_Value = TypeVar("_Value")


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a text, in which no object has a name twice.

    Raises:
        ValueError: it is no JSON in UTF-8, has a number that JSON has no form for, or lies too deep.
    """
    decoded = text.decode() if isinstance(text, bytes) else text
    try:
        return json.loads(decoded, object_pairs_hook=_each_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("its values lie too deep in one another") from None


def typed(value: Any, expected: type[_Value], what: str) -> _Value:
    """Returns a value of exactly one of JSON's types; a bool is no int.

    Raises:
        ValueError: it has another type.
    """
    if type(value) is not expected:
        raise ValueError(f"{what}: expected {_NAMES[expected]}, got {shown(value)}")
    return value


def fields_of(value: Any, names: Collection[str], what: str, optional: Collection[str] = ()) -> dict[str, Any]:
    """Returns an object that has fields of certain names, each of them unless it is optional, and no others.

    Raises:
        ValueError: it is no object, lacks a field, or has another one.
    """
    fields = typed(value, dict, what)
    if missing := sorted(set(names) - fields.keys()):
        raise ValueError(f"{what} has no field {missing[0]!r}")
    if unknown := sorted(fields.keys() - set(names) - set(optional)):
        raise ValueError(f"{what} has an unknown field {shown(unknown[0])}")
    return fields


def whole(value: Any, least: int, most: int, what: str) -> int:
    """Returns an integer within bounds.

    Raises:
        ValueError: it is none, or beyond them.
    """
    if not least <= typed(value, int, what) <= most:
        raise ValueError(f"{what}: expected {least} to {most}, got {shown(value)}")
    return value


def texts(value: Any, what: str) -> list[str]:
    """Returns a list of different strings.

    Raises:
        ValueError: it is none.
    """
    found = [typed(each, str, f"{what}[{place}]") for place, each in enumerate(typed(value, list, what))]
    if len(set(found)) != len(found):
        raise ValueError(f"{what} names one twice: {shown(found)}")
    return found


_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}
_LONGEST = 100
"""Characters of a value that a message shows."""


def shown(value: Any) -> str:
    """Returns a value as a message shows it: cut off if it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # It lies deep, or is an integer of thousands of digits.
        text = type(value).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
