"""Opens files with named columns: finds their schema, or takes the one that is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import Self

from recstore_ops.training.data.arrow_rows import ArrowRows, Records, reraise
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.csv_dialect import Dialect, detect_dialect
from recstore_ops.training.data.csv_rows import CsvRows, csv_samples
from recstore_ops.training.data.sample import ColumnSample, cell_type, samples_of
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.data.schema_detection import ColumnChoices, detect_schema
from recstore_ops.training.data.text_rows import OnBadLine

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


def open_csv(paths: Sequence[Path], schema: Schema | None, choices: ColumnChoices, on_bad_line: OnBadLine) -> ArrowRows:
    """Returns the rows of text files with separated columns.

    Args:
        paths: the files, each written in its own way.
        schema: of their columns; None finds it in the first file that has a row.
        choices: the caller's choices about columns; used without a schema.
        on_bad_line: as in `open_rows`.

    Raises:
        ValueError: a file's lines are not cut alike, or its columns are others than those of the first.
    """
    # Some programs write parts without a byte.
    paths = [path for path in paths if path.stat().st_size > 0] or paths[:1]
    dialects = {path: _dialect(path) for path in paths}
    choices = replace(choices, has_header=dialects[paths[0]].has_header)
    schema, samples = _schema(paths, schema, choices, lambda path: csv_samples(path, dialects[path]))
    return CsvRows(paths, schema, dialects, samples=samples, on_bad_line=on_bad_line)


def open_parquet(
    paths: Sequence[Path], schema: Schema | None, choices: ColumnChoices, on_bad_line: OnBadLine
) -> ArrowRows:
    """Returns the rows of Parquet files; arguments and errors as `open_csv`."""
    schema, samples = _schema(paths, schema, choices, parquet_samples)
    return ParquetRows(paths, schema, samples=samples, on_bad_line=on_bad_line)


def _dialect(path: Path) -> Dialect:
    dialect = detect_dialect(path)
    if dialect is None:
        raise ValueError(f"{path}: expected lines of equally many columns, between ',', tabs, ';' or '|'")
    return dialect


def _schema(
    paths: Sequence[Path],
    schema: Schema | None,
    choices: ColumnChoices,
    samples_of: Callable[[Path], list[ColumnSample]],
) -> tuple[Schema, list[ColumnSample]]:
    """Returns the schema of files, and the columns of the first one that has a row."""
    path, samples = _first_with_rows(paths, samples_of)
    if schema is None:
        roles = {**dict.fromkeys(dict(choices.sequences), "sequence"), **choices.roles}
        schema = detect_schema(samples, replace(choices, roles=roles), str(path))
    is_there = schema.label is None or schema.label.name in [sample.name for sample in samples]
    if not is_there and choices.may_lack_label:
        schema = schema.without_label()
    if choices.sequences:
        schema = schema.with_sequences(choices.sequences)
    return (schema if choices.group_by is None else schema.grouped_by(choices.group_by)), samples


def _first_with_rows(
    paths: Sequence[Path], samples_of: Callable[[Path], list[ColumnSample]]
) -> tuple[Path, list[ColumnSample]]:
    for path in paths:
        samples = samples_of(path)
        if samples and len(samples[0].cells) > 0:
            return path, samples
    raise ValueError(f"{paths[0]} has no row")
