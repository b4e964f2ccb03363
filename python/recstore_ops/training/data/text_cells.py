"""Cells of text as the integers, numbers, booleans and strings that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.types as types
from numpy.typing import NDArray

from recstore_ops.ops.feature_hashing import hash_strings
from recstore_ops.training.data.arrow_functions import pc
from recstore_ops.training.data.field_ids import MISSING, VALUE_BITS

# The hash of strings that are ids: the lower 40 bits of `recstore_ops.hash_strings`.
#
# The same text has the same hash in every file, format and process.

_VALUE_MASK = (1 << VALUE_BITS) - 1


def text_values(cells: pa.Array) -> NDArray[np.int64]:
    """Returns the lower 40 bits of the hash of each string [N], of any Arrow type of strings.

    A missing one has the value `MISSING`, and a string whose hash is that the value with its lowest bit turned over.
    """
    if not (types.is_string(cells.type) or types.is_large_string(cells.type)):
        cells = pc.cast(cells, pa.large_string())
    values = values_of_hashes(hash_strings(cells, missing=0).numpy())
    if cells.null_count > 0:
        values[cells.is_null().to_numpy(zero_copy_only=False)] = MISSING
    return values


def values_of_hashes(hashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the lower 40 bits of hashes, of none of which `MISSING` is the value."""
    values = hashes & _VALUE_MASK
    # A hash may hit the value that stands for a missing cell.
    values[values == MISSING] ^= 1
    return values


def text_places(cells: pa.Array) -> NDArray[np.signedinteger]:
    """Returns the place of each of N strings among the characters, and the end of the last, [N + 1]."""
    width = np.int32 if types.is_string(cells.type) else np.int64
    return np.frombuffer(cells.buffers()[1], dtype=width)[cells.offset : cells.offset + len(cells) + 1]


_MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_TIME = r"^\d{4}[-/]\d\d?[-/]\d\d?([ T]\d\d?:\d\d(:\d\d(\.\d+)?)?)?( ?(Z|UTC|[+-]\d\d:?\d\d))?$"
# What makes other spellings of times those that Arrow reads, one after the other.
_ISO = (
    (r"^\s*(\d{4})[-/](\d\d?)[-/](\d\d?)", r"\1-0\2-0\3"),
    (r"^(\d{4})-0?(\d\d)-0?(\d\d)", r"\1-\2-\3"),
    (r"[ T](\d:)", r"T0\1"),
    (r" ?UTC\s*$", "Z"),
    (r" ([+-]\d\d:?\d\d)\s*$", r"\1"),
    (r"^(\d{4}-\d\d-\d\d)\s*$", r"\1T00:00Z"),
    (r"(\d:\d\d(:\d\d(\.\d+)?)?)\s*$", r"\1Z"),
    (r"([+-]\d\d:?\d\d)Z$", r"\1"),
)
# From here on floating-point numbers are not all integers.
_NOT_ALL_INTEGERS = 2.0**53
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_NEARLY_ALL = 0.99
_FEW = 64
# With these the digits are a name, of a place for example: as numbers, several would be one.
_LEADING_ZERO = r"^-?0\d"


def guess_cells(cells: pa.Array) -> pa.Array:
    """Returns text as the first of integers, numbers, booleans and times that all cells are; if none, as it is.

    Missing cells fit any type; if all cells are missing, the type is Arrow's null. If nearly all cells are numbers and
    some have a fraction, all others are taken for missing.
    """
    cells = pc.cast(cells, pa.string())
    there = _nulled(cells)
    if there.null_count == len(there):
        return pa.nulls(len(cells))
    if not pc.any(pc.match_substring_regex(there, _LEADING_ZERO)).as_py():
        for convert in (_integers, _numbers, _booleans):
            try:
                # Arrow words an error for each cell that does not convert, and few cells tell most types.
                convert(there[:_FEW])
                return convert(there)
            except pa.ArrowInvalid:
                continue
    if pc.all(pc.match_substring_regex(there, _TIME)).as_py():
        return _days(there)
    return _nearly_numbers(there) or as_strings(cells)


def _nearly_numbers(cells: pa.Array) -> pa.Array | None:
    is_number = pc.match_substring_regex(cells, _NUMBER)
    numbers = pc.sum(is_number).as_py() or 0
    has_fraction = pc.any(pc.match_substring(cells.filter(is_number), ".")).as_py()
    if not has_fraction or numbers < _NEARLY_ALL * (len(cells) - cells.null_count):
        return None
    return _numbers(pc.utf8_trim_whitespace(pc.if_else(is_number, cells, None)))


def as_strings(cells: pa.Array) -> pa.Array:
    """Returns text with empty cells as missing ones."""
    if np.diff(text_places(cells)).all():
        return cells
    is_there = pc.not_equal(cells, "")
    # The short way below takes the buffers as they are: those of a slice begin before it, and a mask would be lost.
    if cells.offset > 0 or cells.null_count > 0:
        return pc.if_else(is_there, cells, None)
    _, offsets, characters = cells.buffers()
    return pa.StringArray.from_buffers(len(cells), offsets, characters, is_there.buffers()[1])


def read_cells(cells: pa.Array, type: str) -> tuple[pa.Array, dict[int, str]]:
    """Returns text as cells of a type, and what is wrong with those that are none, which become missing.

    Args:
        cells: strings.
        type: "integer", "number", "boolean", "time" or "string".
    """
    if type == "string":
        return as_strings(cells), {}
    convert = _CONVERSIONS[type]
    there = _nulled(cells)
    try:
        return convert(there), {}
    except pa.ArrowInvalid:
        return _one_by_one(there, type, convert)


def _one_by_one(cells: pa.Array, type: str, convert: Callable[[pa.Array], pa.Array]) -> tuple[pa.Array, dict[int, str]]:
    """Converts each half alone if both together do not convert, down to the bad cells."""
    if len(cells) == 1:
        try:
            return convert(pc.utf8_trim_whitespace(cells)), {}
        except pa.ArrowInvalid:
            article = "an" if type == "integer" else "a"
            return convert(pa.nulls(1, cells.type)), {0: f"expected {article} {type}, got {cells[0].as_py()!r}"}
    half = len(cells) // 2
    parts, bad = [], {}
    for start, part in ((0, cells[:half]), (half, cells[half:])):
        try:
            made, wrong = convert(part), {}
        except pa.ArrowInvalid:
            made, wrong = _one_by_one(part, type, convert)
        parts.append(made)
        bad.update({start + place: message for place, message in wrong.items()})
    return pa.concat_arrays(parts), bad


def _nulled(cells: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_in(cells, value_set=pa.array(_MISSING)), None, cells)


def _integers(cells: pa.Array) -> pa.Array:
    """Integers, also as 7.0, which those of a column with gaps become elsewhere."""
    try:
        return pc.cast(cells, pa.int64())
    except pa.ArrowInvalid:
        numbers = pc.cast(cells, pa.float64())
        if not pc.all(pc.less(pc.abs(numbers), _NOT_ALL_INTEGERS)).as_py():
            raise
        return pc.cast(numbers, pa.int64())


def _numbers(cells: pa.Array) -> pa.Array:
    return pc.cast(cells, pa.float64())


def _booleans(cells: pa.Array) -> pa.Array:
    is_true, is_false = (pc.is_in(cells, value_set=pa.array(words)) for words in (_TRUE, _FALSE))
    if not pc.all(pc.or_kleene(pc.or_(is_true, is_false), pc.is_null(cells))).as_py():
        raise pa.ArrowInvalid("a cell is neither true nor false")
    return pc.if_else(pc.is_null(cells), None, is_true)


def _days(cells: pa.Array) -> pa.Array:
    days = pc.replace_substring(pc.utf8_slice_codeunits(cells, 0, 10), "/", "-")
    return pc.strptime(days, format="%Y-%m-%d", unit="s", error_is_null=True)


def _times(cells: pa.Array) -> pa.Array:
    """Times in UTC, in microseconds; those without a zone are taken as UTC."""
    for pattern, put in _ISO:
        cells = pc.replace_substring_regex(cells, pattern, put)
    return pc.cast(cells, pa.timestamp("us", "UTC"))


_CONVERSIONS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "integer": _integers,
    "number": _numbers,
    "boolean": _booleans,
    "time": _times,
}
