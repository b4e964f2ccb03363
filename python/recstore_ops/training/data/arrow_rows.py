"""Rows of files with named columns, streamed as records of Arrow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import torch
from typing_extensions import Self

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.row_source import RowSource, SkippedRows, check_shard
from recstore_ops.training.data.sample import ColumnSample
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.data.schema_batches import BatchMaker
from recstore_ops.training.data.text_rows import OnBadLine


@dataclass(frozen=True)
class Records:
    """Rows that follow each other in a file.

    Attributes:
        cells: the columns that are read, with the schema's types.
        number_of: returns a row's number in the file, from 1, without a header.
        bad: the rows with a cell that does not have its column's type, and what is wrong with each.
    """

    cells: pa.RecordBatch
    number_of: Callable[[int], int]
    bad: dict[int, str]


class ArrowRows(RowSource):
    """The rows of files with the columns of a schema, in any order, one file after the other.

    Columns become fields, dense features, labels and weights as the schema says. Ids carry their field (`field_ids`):
    strings are hashed to 40 bits (`text_hash`), integers beyond 40 bits are mixed to 40.

    Args:
        paths: the files.
        schema: of all of them.
        samples: the columns of one file with their first rows.
        on_bad_line: "stop" raises at the first row with a cell that its column cannot have; "skip" counts it and goes
            on.

    Iterating raises ValueError, naming file and row, at a bad row or a damaged part of a file.
    """

    format_name: str

    def __init__(
        self, paths: Sequence[Path], schema: Schema, samples: Sequence[ColumnSample], on_bad_line: OnBadLine
    ) -> None:
        self.schema = schema
        self.samples = tuple(samples)
        self._paths = tuple(paths)
        self._on_bad_line: OnBadLine = on_bad_line
        self._batches = BatchMaker(schema)
        self._shard = (0, 1)
        self._start_pass()
        self._rows_of_pass: int | None = None

    @abstractmethod
    def _read_file(self, path: Path) -> Iterator[Batch]:
        """Gives the rows of a file that this shard has."""

    def __iter__(self) -> Iterator[Batch]:
        self._start_pass()
        for path in self._paths:
            yield from self._read_file(path)
        self._rows_of_pass = self._rows_read

    @property
    def field_names(self) -> tuple[str, ...]:
        return self.schema.field_names

    @property
    def dense_names(self) -> tuple[str, ...]:
        return self.schema.dense_names

    @property
    def has_labels(self) -> bool:
        return self.schema.label is not None

    @property
    def sequences(self) -> tuple[tuple[str, str], ...]:
        return self.schema.sequences

    @property
    def group_name(self) -> str | None:
        return None if self.schema.group is None else self.schema.group.name

    @property
    def group_texts(self) -> Mapping[int, str]:
        return self._batches.group_texts

    @property
    def skipped(self) -> tuple[SkippedRows, ...]:
        return tuple(self._skipped.values())

    def shard(self, index: int, count: int) -> Self:
        """Returns every `count`-th block of rows from the `index`-th on."""
        check_shard(index, count)
        part = copy(self)
        own_index, own_count = self._shard
        part._shard = (own_index + own_count * index, own_count * count)
        part._start_pass()
        part._rows_of_pass = None
        return part

    def _start_pass(self) -> None:
        self._skipped: dict[Path, SkippedRows] = {}
        self._rows_read = 0
        self._units_read = 0

    def _is_next_unit_own(self) -> bool:
        index, count = self._shard
        self._units_read += 1
        return (self._units_read - 1) % count == index

    def _good_rows(self, path: Path, records: Records) -> Iterator[Batch]:
        """Gives the good rows of records, if there are any."""
        batch, good = self._batches.to_batch(records.cells)
        good[list(records.bad)] = False
        if not good.all():
            self._meet_bad_rows(path, records, np.flatnonzero(~good))
            batch = batch.take(torch.from_numpy(np.flatnonzero(good)))
        self._rows_read += len(batch)
        if len(batch) > 0:
            yield batch

    def _meet_bad_rows(self, path: Path, records: Records, rows: np.ndarray) -> None:
        first = int(rows[0])
        what = records.bad.get(first) or self._batches.explain(records.cells, first)
        self._meet_bad(path, f"row {records.number_of(first)}: {what}", len(rows))

    def _meet_bad(self, path: Path, message: str, count: int) -> None:
        """Raises at the first bad row, or counts it.

        Raises:
            ValueError: bad rows are not to be skipped.
        """
        if self._on_bad_line == "stop":
            raise ValueError(f"{path}: {message}")
        before = self._skipped.get(path, SkippedRows(path, 0, f"{path}: {message}"))
        self._skipped[path] = replace(before, count=before.count + count)


def reraise(error: Exception, message: str) -> NoReturn:
    """Raises an error of Arrow as one of the file; those of the system stay as they are."""
    # Only what the system refused has a number.
    if getattr(error, "errno", None) is not None:
        raise error
    raise ValueError(f"{message} ({error})") from error
