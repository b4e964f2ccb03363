"""Kinds of columns of delimited text: what a cell must be.

`rust/recstore-text` reads them by these names: CLICK and RATING are labels, COUNT is a dense value
`sign(x) ln(1 + |x|)`, HEX, CATEGORY, KEY and HOUR (the hour of the day) are fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from recstore_ops.training.formats.field_ids import VALUE_BITS

_HEX_DIGITS = 8


class ColumnKind(Enum):
    """What a column is: what a cell must be in words, a good cell."""

    CLICK = ("0 or 1", b"0")
    RATING = ("a finite number", b"0")
    COUNT = ("an integer or nothing", b"")
    HEX = (f"at most {_HEX_DIGITS} hexadecimal digits", b"")
    CATEGORY = (f"an integer of {VALUE_BITS} bits or nothing", b"")
    KEY = (f"an integer of {VALUE_BITS} bits", b"0")
    HOUR = ("a date and hour YYMMDDHH", b"14102100")
    TIMESTAMP = ("an integer", b"0")
    UNREAD = ("other characters", b"0")

    def __init__(self, expected: str, sample: bytes) -> None:
        self.expected = expected
        self.sample = sample


LABEL_KINDS = (ColumnKind.CLICK, ColumnKind.RATING)
FIELD_KINDS = (ColumnKind.HEX, ColumnKind.CATEGORY, ColumnKind.KEY, ColumnKind.HOUR)


@dataclass(frozen=True)
class Column:
    """A column: the name of its feature, its kind, and its title in a header if that is not the name."""

    name: str
    kind: ColumnKind
    title: str | None = None
