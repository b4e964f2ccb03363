"""Delimited text parsed by Arrow and numpy, to compare the native parser with.

Arrow splits and converts a block of lines; what it lets pass beyond the grammar of the columns, such as `0x1f`, spaces
or quotes, has characters that no column has, so that one look at a block's characters refuses it.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import csv

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.delimited import FIELD_KINDS, LABEL_KINDS, Column, ColumnKind
from recstore_ops.training.data.field_ids import MISSING, VALUE_BITS, field_ids

_HEX_DIGITS = 8
_ARROW_BLOCK_BYTES = 2**30
_SPACES_ONLY = re.compile(rb"^ +$", re.MULTILINE)
_ARROW_TYPES = {
    ColumnKind.CLICK: pa.int64(),
    ColumnKind.RATING: pa.float64(),
    ColumnKind.COUNT: pa.int64(),
    ColumnKind.HEX: pa.binary(),
    ColumnKind.CATEGORY: pa.int64(),
    ColumnKind.KEY: pa.int64(),
    ColumnKind.HOUR: pa.int64(),
    ColumnKind.TIMESTAMP: pa.int64(),
}


class ArrowDelimited:
    """Parses lines of `columns` between separators; cells have the given characters only."""

    def __init__(self, columns: Sequence[Column], separator: bytes, characters: bytes, threshold: float = 0.0) -> None:
        self._columns = tuple(columns)
        self._cells = CellReader(columns, separator)
        self._characters = characters + separator + b"\n"
        self._threshold = threshold

    def parse(self, block: bytes) -> Batch:
        """Returns the rows.

        Raises:
            ValueError: some line is bad.
        """
        if b" " in block:
            block = _SPACES_ONLY.sub(b"", block)
        if block.translate(None, self._characters):
            raise ValueError("a character is in no cell")
        columns = self._cells.read(block)
        counts = self._of_kind(columns, ColumnKind.COUNT)
        return Batch(
            ids=torch.from_numpy(self._ids(columns)),
            labels=torch.from_numpy(self._labels(columns)),
            num_fields=sum(column.kind in FIELD_KINDS for column in self._columns),
            dense=torch.from_numpy(dense_of(counts)) if counts else None,
        )

    def _of_kind(self, columns: dict[str, pa.Array], *kinds: ColumnKind) -> list[pa.Array]:
        return [columns[column.name] for column in self._columns if column.kind in kinds]

    def _labels(self, columns: dict[str, pa.Array]) -> NDArray[np.float32]:
        for cells in self._of_kind(columns, ColumnKind.TIMESTAMP):
            check_timestamps(cells)
        label = next((column for column in self._columns if column.kind in LABEL_KINDS), None)
        if label is None:
            return np.full(len(next(iter(columns.values()))), np.nan, dtype=np.float32)
        return labels_of(columns[label.name], label.kind, self._threshold)

    def _ids(self, columns: dict[str, pa.Array]) -> NDArray[np.int64]:
        """The ids, field by field within a row, [B * F]."""
        fields = [column for column in self._columns if column.kind in FIELD_KINDS]
        values_BF = np.empty((len(columns[fields[0].name]), len(fields)), dtype=np.int64)
        hex_fields = [field for field, column in enumerate(fields) if column.kind is ColumnKind.HEX]
        if hex_fields:
            values_BF[:, hex_fields] = hex_values_of(self._of_kind(columns, ColumnKind.HEX)).T
        for field, column in enumerate(fields):
            if column.kind is not ColumnKind.HEX:
                values_BF[:, field] = values_of(columns[column.name], column.kind)
        return field_ids(values_BF).reshape(-1)


class CellReader:
    """Reads lines of the given columns.

    Args:
        columns: in order; those without an Arrow type are not read.
        separator: one character, or several that have no tab.
    """

    def __init__(self, columns: Sequence[Column], separator: bytes) -> None:
        self._types = {column.name: _ARROW_TYPES[column.kind] for column in columns if column.kind in _ARROW_TYPES}
        self._separator = separator
        self._delimiter = separator if len(separator) == 1 else b"\t"
        self._options = {
            "read_options": csv.ReadOptions(
                column_names=[column.name for column in columns], use_threads=False, block_size=_ARROW_BLOCK_BYTES
            ),
            "parse_options": csv.ParseOptions(delimiter=self._delimiter.decode(), quote_char=False),
            "convert_options": csv.ConvertOptions(
                column_types=self._types,
                include_columns=list(self._types),
                null_values=[""],
                strings_can_be_null=False,
            ),
        }

    def read(self, block: bytes) -> dict[str, pa.Array]:
        """Returns the columns that are read, [B] each, by name; an empty number is null.

        Raises:
            ValueError: a line has another number of columns, or a cell is not of its column's Arrow type.
        """
        if not block.strip(b"\n"):
            return {name: pa.array([], arrow_type) for name, arrow_type in self._types.items()}
        if self._delimiter != self._separator:
            block = block.replace(self._separator, self._delimiter)
        table = csv.read_csv(pa.BufferReader(block), **self._options)
        return {name: _one_array(table[name]) for name in self._types}


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


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
