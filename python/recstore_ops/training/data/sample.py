"""The first rows of a file, from which the types and contents of its columns are detected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.types as types
from numpy.typing import NDArray

from recstore_ops.training.data.arrow_functions import pc

# From here on, neighbours among whole numbers are one number.
_WHOLE_LIMITS = {2: 2**11, 4: 2**24, 8: 2**53}
_PARTS_OF_CELLS = 0.01
SEPARATORS = ("|", "^")
"""Characters that separate the ids in a cell of text."""
_BETWEEN = r"[^\{0}]\{0}[^\{0}]"


@dataclass(frozen=True)
class ColumnSample:
    """Cells of a column.

    Attributes:
        name: of the column.
        cells: those of the first rows, with the column's type.
        said: the type in the header: "words" for several between spaces, "numbers" for several numbers.
    """

    name: str
    cells: pa.Array
    said: str | None = None

    @cached_property
    def type(self) -> str:
        """The type as schemas say it."""
        return cell_type(self.cells.type)

    @property
    def missing(self) -> int:
        """How many cells are missing."""
        return self.cells.null_count + (int(np.isnan(self._floats).sum()) if self._is_floating else 0)

    @cached_property
    def distinct(self) -> int:
        """How many values differ among those that are not missing; of lists, among the elements."""
        cells = _elements(self.cells)
        count = len(pc.unique(cells.drop_null()))
        # `unique` counts all NaN as one value, but they are missing cells.
        return count - int(self._is_floating and bool(np.isnan(self._floats).any()))

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """The finite numbers of a column of numbers or booleans."""
        numbers = pc.cast(self.cells.drop_null(), pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return numbers[np.isfinite(numbers)]

    @property
    def is_whole(self) -> bool:
        """Whether no number has a fraction, and there is one."""
        return len(self.numbers) > 0 and bool((self.numbers == np.floor(self.numbers)).all())

    @property
    def merges_whole_numbers(self) -> bool:
        """Whether there are whole numbers so large that the floating-point type has not all of them."""
        if not self._is_floating:
            return False
        return bool((np.abs(self.numbers) >= _WHOLE_LIMITS[self.cells.type.bit_width // 8]).any())

    @property
    def example(self) -> str:
        """A cell that is not missing, for people."""
        cells = self.cells.drop_null()
        return "" if len(cells) == 0 else _shown(cells[0].as_py())

    @cached_property
    def separator(self) -> str | None:
        """The character that separates the values in more than a few cells of text; None if there is none."""
        if self.type != "string" or len(self.cells) == 0:
            return None
        if self.said == "words":
            return " "
        texts = pc.cast(self.cells, pa.large_string())
        found = {each: pc.match_substring_regex(texts, _BETWEEN.format(each)) for each in SEPARATORS}
        counts = {each: pc.sum(matches).as_py() or 0 for each, matches in found.items()}
        best = max(counts, key=lambda each: counts[each])
        return best if counts[best] > _PARTS_OF_CELLS * len(texts) else None

    @property
    def list_size(self) -> int | None:
        """The number of elements of every list; None if lists differ in it, or there is no list."""
        lengths = pc.unique(pc.call_function("list_value_length", [self.cells.drop_null()]))
        return lengths[0].as_py() if len(lengths) == 1 else None

    @property
    def _is_floating(self) -> bool:
        return types.is_floating(self.cells.type)

    @property
    def _floats(self) -> NDArray[np.float64]:
        return pc.cast(self.cells.drop_null(), pa.float64()).to_numpy(zero_copy_only=False)


def samples_of(table: pa.Table | pa.RecordBatch) -> list[ColumnSample]:
    """Returns the columns of first rows."""
    columns = (table.column(place) for place in range(table.num_columns))
    arrays = (each.combine_chunks() if isinstance(each, pa.ChunkedArray) else each for each in columns)
    return [ColumnSample(name, _plain(cells)) for name, cells in zip(table.schema.names, arrays, strict=True)]


def _plain(cells: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(cells, pa.ChunkedArray):
        cells = pa.concat_arrays(cells.chunks) if cells.num_chunks else pa.array([], cells.type)
    return cells.dictionary_decode() if isinstance(cells, pa.DictionaryArray) else cells


def cell_type(arrow: pa.DataType) -> str:
    """Returns the type of cells as schemas say it; other types by Arrow's name."""
    if types.is_dictionary(arrow):
        arrow = arrow.value_type
    if is_list(arrow):
        element = cell_type(arrow.value_type)
        return f"list of {element}" if element in ("integer", "number", "string") else str(arrow)
    for name, is_of_type in _TYPES.items():
        if is_of_type(arrow):
            return name
    return str(arrow)


def is_list(arrow: pa.DataType) -> bool:
    """Whether cells are lists."""
    return types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow)


def is_date(arrow: pa.DataType) -> bool:
    """Whether cells are dates, with or without a time of day."""
    return types.is_timestamp(arrow) or types.is_date(arrow)


def _is_string(arrow: pa.DataType) -> bool:
    return types.is_string(arrow) or types.is_large_string(arrow) or types.is_string_view(arrow)


def _is_number(arrow: pa.DataType) -> bool:
    return types.is_floating(arrow) or types.is_decimal(arrow)


def _is_time(arrow: pa.DataType) -> bool:
    return types.is_temporal(arrow)


_TYPES = {
    "integer": types.is_integer,
    "boolean": types.is_boolean,
    "number": _is_number,
    "string": _is_string,
    "time": _is_time,
}


def _elements(cells: pa.Array) -> pa.Array:
    return cells.flatten() if is_list(cells.type) else cells


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:21] + "..."
