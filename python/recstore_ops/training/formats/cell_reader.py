"""Splits lines of delimited text into columns, and cells into numbers or digits, by Arrow."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyarrow import csv

from recstore_ops.training.formats.columns import Column

_ARROW_BLOCK_BYTES = 2**30  # more than any block: Arrow is not to cut it again


class CellReader:
    """Reads lines of the given columns.

    Args:
        columns: in order; those without an Arrow type are not read.
        separator: one character, or several that have no tab.
    """

    def __init__(self, columns: Sequence[Column], separator: bytes) -> None:
        self._types = {column.name: column.kind.arrow_type for column in columns if column.kind.arrow_type is not None}
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
