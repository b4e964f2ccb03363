"""The rows of text files with separated columns, streamed by blocks of bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from recstore_ops.training.data.arrow_rows import ArrowRows, Records, reraise
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.compressed_file import DamagedStreamError, InputFile, open_input_file
from recstore_ops.training.data.csv_dialect import Dialect
from recstore_ops.training.data.read_ahead import read_ahead
from recstore_ops.training.data.sample import ColumnSample
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.data.text_cells import as_strings, guess_cells, read_cells
from recstore_ops.training.data.text_rows import OnBadLine

BLOCK_BYTES = 2**21
"""A row may have at most this many bytes."""
_SAMPLED_ROWS = 8192
"""Guessing what cells are takes microseconds for each."""
_NO_ROWS = ("Empty CSV file", "Could not skip initial 1 rows")
_NOT_UTF8 = re.compile(r"Row #(\d+): .*invalid UTF8")
"""Arrow's number counts the header, and the rows of all blocks."""
_ARROW_ERRORS = (pa.ArrowException, OSError)


class CsvRows(ArrowRows):
    """The rows of text files; see `ArrowRows`.

    Args:
        paths, schema, samples, on_bad_line: as there.
        dialects: how each file is written.

    Raises:
        ValueError: a file has other columns than the schema. Iterating raises it too if no file has a row.
    """

    format_name = "csv"

    def __init__(
        self,
        paths: Sequence[Path],
        schema: Schema,
        dialects: Mapping[Path, Dialect],
        *,
        samples: Sequence[ColumnSample],
        on_bad_line: OnBadLine,
    ) -> None:
        super().__init__(paths, schema, samples, on_bad_line)
        self._dialects = dialects
        self._total_bytes = sum(map(os.path.getsize, paths))
        for path in paths:
            schema.check_names(dialects[path].names, path)
            schema.check_no_lists(path)

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        if self._rows_read == 0 and not self._skipped and self._shard == (0, 1):
            raise ValueError(f"{self._paths[0]} has no row")

    @property
    def estimated_rows(self) -> int | None:
        if self._rows_of_pass is not None:
            return self._rows_of_pass
        if self._rows_read == 0 or self._bytes_read == 0:
            return None
        return round(self._rows_read * self._total_bytes / self._bytes_read)

    def _start_pass(self) -> None:
        super()._start_pass()
        self._bytes_read = 0

    def _read_file(self, path: Path) -> Iterator[Batch]:
        finished_bytes = self._bytes_read
        dialect, columns = self._dialects[path], [column.name for column in self.schema.read]
        with open_input_file(path) as file, closing(read_ahead(_text_blocks(path, file, dialect, columns))) as blocks:
            for block in blocks:
                if self._is_next_unit_own():
                    for row, found in block.odd_rows:
                        self._meet_bad(path, f"row {row}: expected {len(dialect.names)} columns, got {found}", 1)
                    self._bytes_read = finished_bytes + block.position
                    yield from self._good_rows(path, _typed(block, self.schema))
        self._bytes_read = finished_bytes + os.path.getsize(path)


@dataclass(frozen=True)
class _TextBlock:
    """Rows that follow each other in a file, as text.

    Attributes:
        cells: the columns that are read.
        rows_before: how many rows came before, without those of another number of columns.
        odd_rows: the rows of another number of columns that came since the last block: their numbers, and that number.
        all_odd_rows: those of the whole file so far.
        position: bytes of the file, as it is on the disk, up to the end of the block.
    """

    cells: pa.RecordBatch
    rows_before: int
    odd_rows: tuple[tuple[int, int], ...]
    all_odd_rows: list[tuple[int, int]]
    position: int

    def number_of(self, place: int) -> int:
        """The number in the file of a row of the block."""
        number = self.rows_before + place + 1
        # Odd rows are noted in rising order, so that each moves the number by one before the next is compared with it.
        for odd, _ in self.all_odd_rows:
            number += odd <= number
        return number


def _text_blocks(path: Path, file: InputFile, dialect: Dialect, columns: Sequence[str]) -> Iterator[_TextBlock]:
    """Gives the columns of a file, block by block."""
    odd_rows: list[tuple[int, int]] = []
    rows, told = 0, 0
    arrow_file, cells = _ArrowFile(file), None
    try:
        for number, cells in enumerate(csv.open_csv(arrow_file, **_arrow_options(dialect, columns, odd_rows)), 1):
            yield _TextBlock(cells, rows, tuple(odd_rows[told:]), odd_rows, arrow_file.position_after(number))
            rows, told = rows + cells.num_rows, len(odd_rows)
    except DamagedStreamError as error:
        raise ValueError(f"{path}: {error}, after row {rows}") from error
    except pa.ArrowInvalid as error:
        # ArrowInvalid stands for all that a file can have wrong, so the words of the message decide.
        if "straddl" in str(error):
            message = f"has a row of more than {BLOCK_BYTES} bytes, or a quote that is not closed,"
            raise ValueError(f"{path} {message} after row {rows}") from error
        if (found := _NOT_UTF8.search(str(error))) is not None:
            row = int(found[1]) - int(dialect.has_header)
            raise ValueError(f"{path}: row {row}: expected text in UTF-8, got other bytes") from error
        if not any(message in str(error) for message in _NO_ROWS):
            reraise(error, f"{path}: damaged, or not of this encoding, after row {rows}")
    except _ARROW_ERRORS as error:
        reraise(error, f"{path} is damaged after row {rows}")
    # Arrow ends such a quote with the file, and reports nothing.
    if arrow_file.quotes % 2 == 1 and cells is not None and _has_lines(cells.slice(cells.num_rows - 1)):
        raise ValueError(f"{path}: row {rows + len(odd_rows)} begins a quote that is not closed")
    if len(odd_rows) > told:
        empty = pa.RecordBatch.from_pydict({name: pa.array([], pa.string()) for name in columns})
        yield _TextBlock(empty, rows, tuple(odd_rows[told:]), odd_rows, file.position)


def _has_lines(row: pa.RecordBatch) -> bool:
    """Whether a cell of a row has several lines."""
    return any("\n" in (cells[0].as_py() or "") for cells in row.columns)


def _arrow_options(dialect: Dialect, columns: Sequence[str], odd_rows: list[tuple[int, int]]) -> dict[str, Any]:
    """Returns how Arrow reads a file; rows of another number of columns are noted in `odd_rows`."""

    def note(row: csv.InvalidRow) -> str:
        odd_rows.append((row.number - int(dialect.has_header), row.actual_columns))
        return "skip"

    return {
        "read_options": csv.ReadOptions(
            # With threads Arrow does not know the numbers of odd rows.
            use_threads=False,
            block_size=BLOCK_BYTES,
            column_names=list(dialect.names),
            skip_rows=int(dialect.has_header),
            encoding=dialect.encoding,
        ),
        "parse_options": csv.ParseOptions(
            delimiter=dialect.delimiter, newlines_in_values=True, invalid_row_handler=note
        ),
        "convert_options": csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()), include_columns=list(columns), strings_can_be_null=False
        ),
    }


class _ArrowFile:
    """A file as Arrow reads one.

    Attributes:
        quotes: the quotation marks read so far; an odd number means that a quote is not closed.
    """

    closed = False

    def __init__(self, file: InputFile) -> None:
        self.quotes = 0
        self._bytes_read = 0
        self._file = file

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self.quotes += content.count(b'"')
        self._bytes_read += len(content)
        return content

    def position_after(self, blocks: int) -> int:
        """Returns how many bytes of the file on disk so many blocks take; Arrow reads ahead of them."""
        # Arrow reads ahead of the blocks that it gives, so the position counts only in their share of the bytes.
        return round(self._file.position * min(1.0, blocks * BLOCK_BYTES / max(1, self._bytes_read)))

    def close(self) -> None:
        """Does nothing: the caller that opened the file closes it."""


def csv_samples(path: Path, dialect: Dialect) -> list[ColumnSample]:
    """Returns the columns of a file with its first rows, of the types that fit all of them.

    Raises:
        ValueError: the file is damaged, or has two columns of one name.
    """
    if len(set(dialect.names)) < len(dialect.names):
        repeated = min(name for name in dialect.names if dialect.names.count(name) > 1)
        raise ValueError(f"{path}: expected each column once, got several of the name {repeated!r}")
    with open_input_file(path) as file:
        for block in _text_blocks(path, file, dialect, dialect.names):
            cells = block.cells.slice(0, _SAMPLED_ROWS)
            return [_sample(name, cells.column(name), dialect.types.get(name)) for name in dialect.names]
    return [ColumnSample(name, pa.nulls(0)) for name in dialect.names]


def _sample(name: str, cells: pa.Array, said: str | None) -> ColumnSample:
    if said in ("string", "words", "numbers"):
        return ColumnSample(name, as_strings(cells), said)
    return ColumnSample(name, read_cells(cells, "number")[0] if said == "number" else guess_cells(cells))


def _typed(block: _TextBlock, schema: Schema) -> Records:
    made, bad = [], {}
    for column in schema.read:
        typed, wrong = read_cells(block.cells.column(column.name), column.type)
        made.append(typed)
        for row, message in wrong.items():
            bad.setdefault(row, f"column {column.name!r}: {message}")
    names = [column.name for column in schema.read]
    return Records(pa.RecordBatch.from_arrays(made, names), block.number_of, bad)
