"""The rows of Parquet files, streamed by record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import add
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import Self

from recstore_ops.training.formats.arrow_rows import ArrowRows, Records, reraise
from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.text_rows import OnBadLine
from recstore_ops.training.schema.columns import Schema
from recstore_ops.training.schema.sample import ColumnSample, cell_type, samples_of

ROWS_PER_BLOCK = 8192
_BUFFER_BYTES = 2**20
_ARROW_ERRORS = (pa.ArrowException, OSError)


class ParquetRows(ArrowRows):
    """The rows of Parquet files; see `ArrowRows`.

    Raises:
        ValueError: a file is no Parquet file, or has other columns than the schema.
    """

    format_name = "parquet"

    def __init__(
        self, paths: Sequence[Path], schema: Schema, *, samples: Sequence[ColumnSample], on_bad_line: OnBadLine
    ) -> None:
        super().__init__(paths, schema, samples, on_bad_line)
        self._group_rows = {path: _check_footer(path, schema) for path in self._paths}
        self._shard_unit: Literal["row group", "block"] | None = None

    @property
    def estimated_rows(self) -> int:
        if self._rows_of_pass is not None:
            return self._rows_of_pass
        return sum(map(sum, self._group_rows.values())) // self._shard[1]

    def shard(self, index: int, count: int) -> Self:
        """Returns every `count`-th row group if there are that many, or else every `count`-th block of rows.

        Shards by row groups read nothing of the others' rows.
        """
        part = super().shard(index, count)
        if part._shard_unit is None:
            part._shard_unit = "row group" if sum(map(len, self._group_rows.values())) >= count else "block"
        return part

    def _read_file(self, path: Path) -> Iterator[Batch]:
        group_start = 0
        with _open_parquet(path) as file:
            for group, num_rows in enumerate(self._group_rows[path]):
                if self._shard_unit != "row group" or self._is_next_unit_own():
                    yield from self._read_group(path, file, group, group_start)
                group_start += num_rows

    def _read_group(self, path: Path, file: pq.ParquetFile, group: int, start: int) -> Iterator[Batch]:
        names = [column.name for column in self.schema.read]
        for cells in _record_batches(path, file, group, start, names):
            if self._shard_unit == "row group" or self._is_next_unit_own():
                yield from self._good_rows(path, Records(cells, partial(add, start + 1), {}))
            start += cells.num_rows


def parquet_samples(path: Path) -> list[ColumnSample]:
    """Returns the columns of a file with their first rows.

    Raises:
        ValueError: it is no whole Parquet file, or is damaged.
    """
    with _open_parquet(path) as file:
        for group in range(file.metadata.num_row_groups):
            for cells in _record_batches(path, file, group, 0, None):
                return samples_of(cells)
        return samples_of(file.schema_arrow.empty_table())


def _check_footer(path: Path, schema: Schema) -> list[int]:
    """Checks that a file has the columns of the schema, and returns the rows of its row groups."""
    with _open_parquet(path) as file:
        arrow = file.schema_arrow
        schema.check_names(tuple(arrow.names), path)
        schema.check_types({name: cell_type(arrow.field(name).type) for name in set(arrow.names)}, path)
        return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        # Without pre-buffering a row group is read bit by bit, and checksums tell of damage where a file has them.
        return pq.ParquetFile(
            path, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True, memory_map=False
        )
    except _ARROW_ERRORS as error:
        reraise(error, f"{path} is no whole Parquet file")


def _record_batches(
    path: Path, file: pq.ParquetFile, group: int, start: int, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    try:
        for records in file.iter_batches(ROWS_PER_BLOCK, row_groups=[group], columns=columns, use_threads=False):
            yield records
            start += records.num_rows
    except _ARROW_ERRORS as error:
        reraise(error, f"{path} is damaged after row {start}")
