"""Objects of JSON that have each key once: `json.loads` takes the last of several without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def distinct_keys(twice: Callable[[str, Any, Any], Exception]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Returns an `object_pairs_hook` for `json.loads` that refuses a repeated key.

    Args:
        twice: makes the error for a repeated key, from the key, its earlier value and its new value.
    """

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise twice(key, found[key], value)
            found[key] = value
        return found

    return as_object
