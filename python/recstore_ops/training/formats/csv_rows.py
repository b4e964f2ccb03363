"""The rows of text files with separated columns, streamed by blocks of bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import csv

from recstore_ops.training.formats.arrow_rows import ArrowRows, Records, reraise
from recstore_ops.training.formats.csv_dialect import Dialect
from recstore_ops.training.formats.text_cells import as_strings, guess_cells, read_cells
from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.compressed_file import DamagedStreamError, InputFile, open_input_file
from recstore_ops.training.rows.text_rows import OnBadLine
from recstore_ops.training.schema.columns import Schema
from recstore_ops.training.schema.sample import ColumnSample

BLOCK_BYTES = 2**20
"""A row may have at most this many bytes."""
_NO_ROWS = ("Empty CSV file", "Could not skip initial 1 rows")
_ARROW_ERRORS = (pa.ArrowException, OSError)


class CsvRows(ArrowRows):
    """The rows of text files; see `ArrowRows`.

    Args:
        paths, schema, samples, on_bad_line: as there.
        dialects: how each file is written.

    Raises:
        ValueError: a file has other columns than the schema. Iterating raises it where no file has a row, too.
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
        for path in paths:
            schema.check_names(dialects[path].names, path)

    def __iter__(self) -> Iterator[Batch]:
        self._total_bytes = sum(map(os.path.getsize, self._paths))
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
        self._total_bytes = 0

    def _read_file(self, path: Path) -> Iterator[Batch]:
        finished_bytes = self._bytes_read
        with open_input_file(path) as file:
            reading = _Reading(path, file, self._dialects[path], [column.name for column in self.schema.read])
            for cells in reading:
                if self._is_next_unit_own():
                    self._meet_odd_rows(path, reading)
                    yield from self._good_rows(path, _typed(cells, self.schema, reading.numbering()))
                    self._bytes_read = finished_bytes + file.position
            if self._shard[0] == 0:
                self._meet_odd_rows(path, reading)
        self._bytes_read = finished_bytes + os.path.getsize(path)

    def _meet_odd_rows(self, path: Path, reading: _Reading) -> None:
        for row, found in reading.take_odd_rows():
            self._meet_bad(path, f"row {row}: expected {len(self._dialects[path].names)} columns, got {found}", 1)


class _Reading:
    """The columns of a file as text, block by block."""

    def __init__(self, path: Path, file: InputFile, dialect: Dialect, columns: Sequence[str]) -> None:
        self._path = path
        self._file = file
        self._dialect = dialect
        self._columns = columns
        # The rows that have another number of columns: their numbers, and that number.
        self._odd_rows: list[tuple[int, int]] = []
        self._told = 0
        self._rows_before = self._rows = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            for cells in csv.open_csv(_ArrowFile(self._file), **self._options()):
                self._rows_before, self._rows = self._rows, self._rows + cells.num_rows
                yield cells
        except DamagedStreamError as error:
            raise ValueError(f"{self._path}: {error}, after row {self._rows}") from error
        except pa.ArrowInvalid as error:
            if not any(message in str(error) for message in _NO_ROWS):
                reraise(error, f"{self._path}: damaged, or not of this encoding, after row {self._rows}")
        except _ARROW_ERRORS as error:
            reraise(error, f"{self._path} is damaged after row {self._rows}")

    def take_odd_rows(self) -> list[tuple[int, int]]:
        """Returns the numbers of rows that have another number of columns, with that number, since the last call."""
        told, self._told = self._told, len(self._odd_rows)
        return self._odd_rows[told:]

    def numbering(self) -> Callable[[int], int]:
        """Returns what tells the number in the file of a row of the block."""
        before, odd_rows = self._rows_before, self._odd_rows

        def number_of(place: int) -> int:
            number = before + place + 1
            for odd, _ in odd_rows:
                number += odd <= number
            return number

        return number_of

    def _options(self) -> dict[str, object]:
        return {
            "read_options": csv.ReadOptions(
                use_threads=False,
                block_size=BLOCK_BYTES,
                column_names=list(self._dialect.names),
                skip_rows=int(self._dialect.has_header),
                encoding=self._dialect.encoding,
            ),
            "parse_options": csv.ParseOptions(
                delimiter=self._dialect.delimiter, newlines_in_values=True, invalid_row_handler=self._note_odd_row
            ),
            "convert_options": csv.ConvertOptions(
                column_types=dict.fromkeys(self._columns, pa.string()),
                include_columns=list(self._columns),
                strings_can_be_null=False,
            ),
        }

    def _note_odd_row(self, row: csv.InvalidRow) -> str:
        self._odd_rows.append((row.number - int(self._dialect.has_header), row.actual_columns))
        return "skip"


class _ArrowFile:
    """A file as Arrow reads one."""

    closed = False

    def __init__(self, file: InputFile) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def close(self) -> None:
        """Whoever opened the file closes it."""


def csv_samples(path: Path, dialect: Dialect) -> list[ColumnSample]:
    """Returns the columns of a file with the rows of its first block, of the types that fit all of them.

    Raises:
        ValueError: the file is damaged, or has two columns of one name.
    """
    if len(set(dialect.names)) < len(dialect.names):
        repeated = min(name for name in dialect.names if dialect.names.count(name) > 1)
        raise ValueError(f"{path}: expected each column once, got several of the name {repeated!r}")
    with open_input_file(path) as file:
        for cells in _Reading(path, file, dialect, dialect.names):
            return [_sample(name, cells.column(name), dialect.types.get(name)) for name in dialect.names]
    return [ColumnSample(name, pa.nulls(0)) for name in dialect.names]


def _sample(name: str, cells: pa.Array, said: str | None) -> ColumnSample:
    if said in ("string", "words", "numbers"):
        return ColumnSample(name, as_strings(cells))
    return ColumnSample(name, read_cells(cells, "number")[0] if said == "number" else guess_cells(cells))


def _typed(cells: pa.RecordBatch, schema: Schema, number_of: Callable[[int], int]) -> Records:
    made, bad = [], {}
    for column in schema.read:
        typed, wrong = read_cells(cells.column(column.name), column.type)
        made.append(typed)
        for row, message in wrong.items():
            bad.setdefault(row, f"column {column.name!r}: {message}")
    names = [column.name for column in schema.read]
    return Records(pa.RecordBatch.from_arrays(made, names), number_of, bad)
