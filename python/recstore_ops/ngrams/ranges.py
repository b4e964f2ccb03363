"""Numbers of a scheme that have to lie in a range, and numbers that have to agree with those of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recstore_ops.ops.integers import as_int64

MAX_INT64 = 2**63 - 1
MAX_ORDER = 16
"""Tokens of the longest n-grams of a published scheme; the longest known have 4."""
MAX_HEADS = 64
"""Hash functions of each length in a published scheme; the most known are 8."""


def in_range(owner: str, name: str, value: Any, least: int, most: int) -> int:
    """Returns a number as an int.

    Args:
        owner: begins the message.

    Raises:
        TypeError: no integer.
        ValueError: out of the range, whose ends both belong to it.
    """
    number = as_int64(owner, name, value)
    if not least <= number <= most:
        raise ValueError(f"{owner}: expected {name} from {least} to {most}, got {number}")
    return number


def all_in_range(owner: str, name: str, values: Sequence[Any], least: int, most: int) -> tuple[int, ...]:
    """Returns numbers as ints, as `in_range`.

    Raises:
        TypeError: no sequence, or an element that is no integer.
        ValueError: an element out of the range.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{owner}: {name} must be a sequence of integers, got {values!r}")
    return tuple(in_range(owner, f"{name}[{at}]", value, least, most) for at, value in enumerate(values))


def check_agreement(owner: str, what: str, derived: int | Sequence[int], expected: int | Sequence[int] | None) -> None:
    """Checks numbers that follow from a scheme against those of a file or a description.

    Args:
        expected: None if there are none to compare with.

    Raises:
        ValueError: they differ; names both.
    """
    if expected is None:
        return
    ours, theirs = (value if isinstance(value, int) else list(value) for value in (derived, expected))
    if ours != theirs:
        raise ValueError(f"{owner}: expected {what} {theirs}, but the numbers of the scheme give {ours}")


def starts_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns where each of several ranges begins that lie one after the other from 0 on."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return tuple(starts[:-1])


def checked_total(owner: str, moduli: tuple[int, ...]) -> tuple[int, ...]:
    """Returns moduli whose ranges of rows fit into int64 together.

    Raises:
        ValueError: they do not.
    """
    if sum(moduli) > MAX_INT64:
        raise ValueError(f"{owner}: expected at most 2**63 - 1 rows, got {sum(moduli)}, the sum of {list(moduli)}")
    return moduli
