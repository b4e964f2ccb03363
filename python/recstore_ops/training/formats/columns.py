"""Kinds of columns of delimited text: what a cell must be, and which number it stands for."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recstore_ops.training.formats.field_ids import MISSING, VALUE_BITS

_HEX_DIGITS = 8


class ColumnKind(Enum):
    """What a column is: its Arrow type, what a cell must be in words, a good cell."""

    CLICK = (pa.int64(), "0 or 1", b"0")
    RATING = (pa.float64(), "a finite number", b"0")
    COUNT = (pa.int64(), "an integer or nothing", b"")
    HEX = (pa.binary(), f"at most {_HEX_DIGITS} hexadecimal digits", b"")
    CATEGORY = (pa.int64(), f"an integer of {VALUE_BITS} bits or nothing", b"")
    KEY = (pa.int64(), f"an integer of {VALUE_BITS} bits", b"0")
    HOUR = (pa.int64(), "a date and hour YYMMDDHH", b"14102100")
    TIMESTAMP = (pa.int64(), "an integer", b"0")
    UNREAD = (None, "other characters", b"0")

    def __init__(self, arrow_type: pa.DataType | None, expected: str, sample: bytes) -> None:
        self.arrow_type = arrow_type
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


def labels_of(cells: pa.Array, kind: ColumnKind, threshold: float) -> NDArray[np.float32]:
    """Returns the labels [B] of the clicks or ratings; a rating counts from `threshold` on.

    Raises:
        ValueError: a cell is missing or none that the kind has.
    """
    numbers = _without_missing(cells)
    if kind is ColumnKind.RATING:
        _refuse(~np.isfinite(numbers), "a rating is not finite")
        return (numbers >= threshold).astype(np.float32)
    _refuse((numbers != 0) & (numbers != 1), "a label is neither 0 nor 1")
    return numbers.astype(np.float32)


def dense_of(columns: Sequence[pa.Array]) -> NDArray[np.float32]:
    """Returns sign(x) * ln(1 + |x|) of the counts x of J columns, [B, J]; a missing one gives 0."""
    # Arrow gives integers with gaps as float64 with NaN in the gaps.
    counts_JB = np.empty((len(columns), len(columns[0])), dtype=np.float64)
    for counts_B, cells in zip(counts_JB, columns, strict=True):
        counts_B[:] = cells.to_numpy(zero_copy_only=False)
    counts_JB[np.isnan(counts_JB)] = 0
    sizes_JB = np.log(1 + np.abs(counts_JB))  # as exact as log1p, for integers
    return np.ascontiguousarray(np.copysign(sizes_JB, counts_JB).T, dtype=np.float32)


def values_of(cells: pa.Array, kind: ColumnKind) -> NDArray[np.int64]:
    """Returns the values [B] that stand for integers; a missing one becomes `MISSING`.

    Raises:
        ValueError: a cell is none that the kind has.
    """
    if kind is ColumnKind.CATEGORY:
        cells = cells.fill_null(MISSING)
    numbers = _without_missing(cells)
    if kind is ColumnKind.HOUR:
        return _hours_of_the_day(numbers)
    # Beyond these, two numbers would share an id.
    half = 1 << (VALUE_BITS - 1)
    _refuse((numbers < -half) | (numbers >= half), f"an integer has more than {VALUE_BITS} bits")
    return numbers


def check_timestamps(cells: pa.Array) -> None:
    """Raises ValueError if one is missing."""
    _without_missing(cells)


def hex_values_of(columns: Sequence[pa.Array]) -> NDArray[np.int64]:
    """Returns the values [F, B] of F hexadecimal columns; an empty cell becomes `MISSING`.

    All columns are decoded at once: calls for each of 26 columns would take longer than their work.

    Raises:
        ValueError: a cell has other characters, or too many.
    """
    digits, lengths = _joined_cells(columns)
    _refuse(lengths > _HEX_DIGITS, f"a cell has more than {_HEX_DIGITS} digits")
    given = lengths > 0
    if len(digits) != _HEX_DIGITS * np.count_nonzero(given):
        digits = _padded(digits, lengths[given])
    values = np.full(len(lengths), MISSING, dtype=np.int64)
    values[given] = np.frombuffer(unhexlify(digits), dtype=">u4")
    return values.reshape(len(columns), -1)


def _joined_cells(columns: Sequence[pa.Array]) -> tuple[bytes, NDArray[np.int32]]:
    """Returns the characters of all cells, one column after the other, and the length of each cell."""
    digits, lengths = [], []
    for cells in columns:
        _, offsets, characters = cells.buffers()
        starts = np.frombuffer(offsets, dtype=np.int32)[cells.offset : cells.offset + len(cells) + 1]
        digits.append(memoryview(characters or b"")[starts[0] : starts[-1]])
        lengths.append(np.diff(starts))
    return b"".join(digits), np.concatenate(lengths)


def _padded(digits: bytes, lengths: NDArray[np.int32]) -> bytes:
    """Puts zeros before cells of 1 to 8 digits, so that each has 8."""
    ends = np.cumsum(lengths)
    padding = _HEX_DIGITS * np.arange(1, len(lengths) + 1) - ends  # zeros before each cell and all cells before it
    padded = np.full(_HEX_DIGITS * len(lengths), ord("0"), dtype=np.uint8)
    padded[np.arange(len(digits)) + np.repeat(padding, lengths)] = np.frombuffer(digits, dtype=np.uint8)
    return padded.tobytes()


def _hours_of_the_day(hours: NDArray[np.int64]) -> NDArray[np.int64]:
    months, days = hours // 10_000 % 100, hours // 100 % 100
    _refuse((hours < 0) | (hours >= 10**8), "an hour has more than 8 digits or a sign")
    _refuse((months < 1) | (months > 12) | (days < 1) | (days > 31) | (hours % 100 > 23), "no such hour")
    return hours % 100


def _without_missing(cells: pa.Array) -> NDArray:
    if cells.null_count > 0:
        raise ValueError("a cell is missing")
    return cells.to_numpy(zero_copy_only=False)


def _refuse(bad: NDArray[np.bool_], message: str) -> None:
    if bad.any():
        raise ValueError(message)
