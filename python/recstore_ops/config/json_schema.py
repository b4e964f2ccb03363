"""Checks a JSON value against a schema, and reports the place of each problem.

Only the keywords of draft 2020-12 that `recstore_config.schema.json` uses are known, so that the package needs no
validator of its own; any other keyword in a schema is a `KeyError`.
"""

from __future__ import annotations

import difflib
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

Schema = dict[str, Any]

# "then" and "else" are read with "if".
_CHECKED_ELSEWHERE = {"$schema", "$defs", "title", "description", "then", "else"}


@dataclass(frozen=True)
class Problem:
    """A problem with one value.

    Attributes:
        path: the keys that lead to the value, joined by points; empty for the whole document.
        message: the problem itself.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@dataclass(frozen=True)
class _Place:
    """The place of a value in a document, and the schema that references are resolved in."""

    root: Schema
    keys: tuple[str, ...] = ()

    def at(self, key: str | int) -> _Place:
        return _Place(self.root, (*self.keys, str(key)))

    def problem(self, message: str) -> Problem:
        return Problem(".".join(self.keys), message)


def find_problems(value: Any, schema: Schema) -> list[Problem]:
    """Returns all that is wrong with a value, as `json.loads` gives it, in the order of the schema's keywords."""
    return list(dict.fromkeys(_check(value, schema, _Place(schema))))


def _check(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    for keyword in schema:
        if keyword not in _CHECKED_ELSEWHERE:
            yield from _KEYWORDS[keyword](value, schema, place)


def _check_type(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(_TYPES[name](value) for name in names):
        yield place.problem(f"must be {' or '.join(names)}, got {_shown(value)}")


def _check_enum(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    if value not in schema["enum"]:
        choices = ", ".join(json.dumps(choice) for choice in schema["enum"])
        yield place.problem(f"must be one of {choices}, got {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return json.dumps(value)


_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (operator.ge, "at least"),
    "maximum": (operator.le, "at most"),
    "exclusiveMinimum": (operator.gt, "above"),
    "exclusiveMaximum": (operator.lt, "below"),
    "minItems": (operator.ge, "at least"),
    "maxItems": (operator.le, "at most"),
}


def _check_bound(keyword: str, value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    (holds, relation), bound = _BOUNDS[keyword], schema[keyword]
    if _is_number(value) and not holds(value, bound):
        yield place.problem(f"must be {relation} {bound}, got {value}")


def _check_length(keyword: str, value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    (holds, relation), bound = _BOUNDS[keyword], schema[keyword]
    if isinstance(value, list) and not holds(len(value), bound):
        yield place.problem(f"must have {relation} {bound} elements, got {len(value)}")


def _check_min_length(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    if isinstance(value, str) and len(value) < schema["minLength"]:
        yield place.problem("must not be empty")


def _check_items(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    for position, item in enumerate(value if isinstance(value, list) else []):
        yield from _check(item, schema["items"], place.at(position))


def _check_required(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    for key in schema["required"] if isinstance(value, dict) else []:
        if key in value:
            continue
        others = [other for other in value if other not in schema.get("properties", ())]
        # A key that is nearly right is reported in place of the one that is missing: both have one cause.
        for misspelt in difflib.get_close_matches(key, others, n=1):
            yield place.at(misspelt).problem(f'unknown key; did you mean "{key}"?')
            break
        else:
            yield place.problem(f'needs "{key}"')


def _check_properties(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    for key, item in value.items() if isinstance(value, dict) else []:
        if key in schema["properties"]:
            yield from _check(item, schema["properties"][key], place.at(key))


def _check_property_names(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    for key in value if isinstance(value, dict) else []:
        yield from _check(key, schema["propertyNames"], place.at(key))


def _check_additional_properties(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    known, additional = schema.get("properties", {}), schema["additionalProperties"]
    for key, item in value.items() if isinstance(value, dict) else []:
        if key in known:
            continue
        if additional is False:
            yield place.at(key).problem(_unknown(key, list(known)))
        else:
            yield from _check(item, additional, place.at(key))


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f'unknown key; did you mean "{near[0]}"?' if near else f"unknown key; the known ones are {', '.join(known)}"


def _check_reference(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    yield from _check(value, place.root["$defs"][schema["$ref"].removeprefix("#/$defs/")], place)


def _check_all_of(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    for part in schema["allOf"]:
        yield from _check(value, part, place)


def _check_condition(value: Any, schema: Schema, place: _Place) -> Iterator[Problem]:
    holds = next(_check(value, schema["if"], place), None) is None
    yield from _check(value, schema.get("then" if holds else "else", {}), place)


def _is_number(value: Any) -> bool:
    # In Python a bool is an int, in JSON it is no number.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, int) or value.is_integer())


_TYPES: dict[str, Callable[[Any], bool]] = {
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "integer": _is_integer,
    "null": lambda value: value is None,
    "number": _is_number,
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}

_KEYWORDS: dict[str, Callable[[Any, Schema, _Place], Iterator[Problem]]] = {
    "$ref": _check_reference,
    "additionalProperties": _check_additional_properties,
    "allOf": _check_all_of,
    "enum": _check_enum,
    "exclusiveMaximum": partial(_check_bound, "exclusiveMaximum"),
    "exclusiveMinimum": partial(_check_bound, "exclusiveMinimum"),
    "if": _check_condition,
    "items": _check_items,
    "maxItems": partial(_check_length, "maxItems"),
    "maximum": partial(_check_bound, "maximum"),
    "minItems": partial(_check_length, "minItems"),
    "minLength": _check_min_length,
    "minimum": partial(_check_bound, "minimum"),
    "properties": _check_properties,
    "propertyNames": _check_property_names,
    "required": _check_required,
    "type": _check_type,
}
