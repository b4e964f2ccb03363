"""The rows of Parquet files, streamed by record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from recstore_ops.training.formats.field_ids import field_ids
from recstore_ops.training.formats.parquet_columns import (
    ParquetColumns,
    choose_columns,
    dense_of,
    labels_of,
    values_of,
)
from recstore_ops.training.formats.ragged_fields import FieldColumn, interleave_fields
from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.row_source import RowSource, SkippedRows, check_shard
from recstore_ops.training.rows.text_rows import OnBadLine

ROWS_PER_BLOCK = 8192
_BUFFER_BYTES = 2**20
_ARROW_ERRORS = (pa.ArrowException, OSError)


class ParquetRows(RowSource):
    """The rows of Parquet files with the same columns, in any order, one file after the other.

    Columns of floating-point numbers are dense features as they are, 0 where one is missing. Columns of integers,
    booleans or strings are fields with one id a row, columns of lists of integers or strings fields with any number.
    Ids carry their field (`field_ids`): strings are hashed to 40 bits, integers beyond 40 bits are mixed to 40.

    Args:
        paths: the files.
        label_column: None takes `label` or else `click`; its cells are 0 or 1, or booleans.
        drop_columns: are not read.
        on_bad_line: "stop" raises at the first row whose label is neither 0 nor 1 or that has a dense feature
            which is not finite; "skip" counts it and goes on.
        like: rows whose columns these have too, by name, such as the training rows of test rows.

    Raises:
        ValueError: a file is no Parquet file, its columns are others than those of the first, or a column is missing
            or of a type that cannot be read. Iterating raises it, naming file and row, at a bad row or a damaged part
            of a file.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        label_column: str | None = None,
        drop_columns: Sequence[str] = (),
        on_bad_line: OnBadLine = "stop",
        like: ParquetRows | None = None,
    ) -> None:
        self._paths = tuple(paths)
        self._on_bad_line: OnBadLine = on_bad_line
        schemas, self._group_rows = _read_footers(self._paths)
        if like is None:
            with _naming(self._paths[0]):
                self._columns = choose_columns(schemas[0], label_column, drop_columns)
            self._schema, self._first = schemas[0], self._paths[0]
        else:
            self._columns, self._schema, self._first = like._columns, like._schema, like._first
        for path, schema in zip(self._paths, schemas, strict=True):
            with _naming(path):
                self._columns.check(schema, self._schema, drop_columns, self._first)
        self._shard = (0, 1)
        self._shard_unit: Literal["row group", "block"] | None = None
        self._start_pass()
        self._rows_of_pass: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        self._start_pass()
        for path, group_rows in zip(self._paths, self._group_rows, strict=True):
            yield from self._read_file(path, group_rows)
        self._rows_of_pass = self._rows_read

    @property
    def estimated_rows(self) -> int:
        if self._rows_of_pass is not None:
            return self._rows_of_pass
        return sum(map(sum, self._group_rows)) // self._shard[1]

    @property
    def field_names(self) -> tuple[str, ...]:
        return self._columns.fields

    @property
    def dense_names(self) -> tuple[str, ...]:
        return self._columns.dense

    @property
    def skipped(self) -> tuple[SkippedRows, ...]:
        return tuple(self._skipped.values())

    def shard(self, index: int, count: int) -> ParquetRows:
        """Returns every `count`-th row group if there are that many, or else every `count`-th block of rows.

        Shards by row groups read nothing of the others' rows.
        """
        check_shard(index, count)
        part = copy(self)
        own_index, own_count = self._shard
        part._shard = (own_index + own_count * index, own_count * count)
        if part._shard_unit is None:
            part._shard_unit = "row group" if sum(map(len, self._group_rows)) >= count else "block"
        part._start_pass()
        part._rows_of_pass = None
        return part

    def _start_pass(self) -> None:
        self._skipped: dict[Path, SkippedRows] = {}
        self._rows_read = 0
        self._units_read = 0

    def _read_file(self, path: Path, group_rows: Sequence[int]) -> Iterator[Batch]:
        group_start = 0
        with _open_parquet(path) as file:
            for group, num_rows in enumerate(group_rows):
                if self._shard_unit != "row group" or self._is_next_unit_own():
                    yield from self._read_group(path, file, group, group_start)
                group_start += num_rows

    def _read_group(self, path: Path, file: pq.ParquetFile, group: int, start: int) -> Iterator[Batch]:
        for records in _record_batches(path, file, group, start, self._columns.all):
            if self._shard_unit == "row group" or self._is_next_unit_own():
                batch = self._good_rows(path, records, start)
                self._rows_read += len(batch)
                if len(batch) > 0:
                    yield batch
            start += records.num_rows

    def _is_next_unit_own(self) -> bool:
        index, count = self._shard
        self._units_read += 1
        return (self._units_read - 1) % count == index

    def _good_rows(self, path: Path, records: pa.RecordBatch, start: int) -> Batch:
        batch, good = _to_batch(records, self._columns)
        if good.all():
            return batch
        first = int(np.flatnonzero(~good)[0])
        message = f"{path}: row {start + first + 1}: {_explain_row(records, self._columns, first)}"
        if self._on_bad_line == "stop":
            raise ValueError(message)
        before = self._skipped.get(path, SkippedRows(path, 0, message))
        self._skipped[path] = replace(before, count=before.count + int(np.count_nonzero(~good)))
        return batch.take(torch.from_numpy(np.flatnonzero(good)))


def _to_batch(records: pa.RecordBatch, columns: ParquetColumns) -> tuple[Batch, NDArray[np.bool_]]:
    """Returns all rows, and which of them are good [B]."""
    labels, good = labels_of(records.column(columns.label))
    dense = [dense_of(records.column(name)) for name in columns.dense]
    for _, is_finite in dense:
        good &= is_finite
    ids, offsets = interleave_fields([_field_column(records.column(name), n) for n, name in enumerate(columns.fields)])
    batch = Batch(
        ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        num_fields=len(columns.fields),
        offsets=None if offsets is None else torch.from_numpy(offsets),
        dense=torch.from_numpy(np.stack([numbers for numbers, _ in dense], axis=1)) if dense else None,
    )
    return batch, good


def _field_column(cells: pa.Array, field: int) -> FieldColumn:
    values, lengths = values_of(cells)
    return field_ids(values[:, None], field)[:, 0], lengths


def _explain_row(records: pa.RecordBatch, columns: ParquetColumns, row: int) -> str:
    label = records.column(columns.label)[row : row + 1]
    if not labels_of(label)[1].all():
        return f"expected 0 or 1 in column {columns.label!r}, got {label[0].as_py()}"
    cells = {name: records.column(name)[row : row + 1] for name in columns.dense}
    name = next(name for name in columns.dense if not dense_of(cells[name])[1].all())
    return f"expected a finite 32-bit number in column {name!r}, got {cells[name][0].as_py()}"


def _read_footers(paths: Sequence[Path]) -> tuple[list[pa.Schema], list[list[int]]]:
    """Returns the schema of each file, and the rows of its row groups."""
    schemas, group_rows = [], []
    for path in paths:
        with _open_parquet(path) as file:
            schemas.append(file.schema_arrow)
            groups = range(file.metadata.num_row_groups)
            group_rows.append([file.metadata.row_group(group).num_rows for group in groups])
        if not sum(group_rows[-1]):
            raise ValueError(f"{path} has no row")
    return schemas, group_rows


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        # Without pre-buffering a row group is read bit by bit, and checksums tell of damage where a file has them.
        return pq.ParquetFile(
            path, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True, memory_map=False
        )
    except _ARROW_ERRORS as error:
        _reraise(error, f"{path} is no whole Parquet file")


def _record_batches(
    path: Path, file: pq.ParquetFile, group: int, start: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    try:
        for records in file.iter_batches(ROWS_PER_BLOCK, row_groups=[group], columns=columns, use_threads=False):
            yield records
            start += records.num_rows
    except _ARROW_ERRORS as error:
        _reraise(error, f"{path} is damaged after row {start}")


def _reraise(error: Exception, message: str) -> NoReturn:
    # Only what the system refused has a number.
    if getattr(error, "errno", None) is not None:
        raise error
    raise ValueError(f"{message} ({error})") from error
