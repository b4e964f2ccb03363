"""Streams of rows: from text files or memory, cached, split, shuffled and cut into batches.

A `RowSource` can be passed over again and again and gives the same rows in the same order each
time, in blocks of any size. Nothing here holds a whole file, except `CachedRows`, up to its bound.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import numpy as np
import torch

from recstore_ops.training.batch import Batch, concatenate
from recstore_ops.training.text_format import (
    FileFormat,
    detect_format,
    explain_bad_line,
    parse_lines,
)

LINES_PER_BLOCK = 4096
_GZIP_MAGIC = b"\x1f\x8b"


class RowSource(Protocol):
    """A stream of rows that starts anew with every iteration."""

    def __iter__(self) -> Iterator[Batch]: ...

    @property
    def estimated_rows(self) -> int | None:
        """Rows of one pass: exact after a whole pass, an estimate before, None if unknown."""
        ...


class MemoryRows:
    """The rows of one batch in memory, as a source."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Batch]:
        yield self._batch

    @property
    def estimated_rows(self) -> int:
        return len(self._batch)


class TextRows:
    """The rows of libsvm or libffm files, one file after the other; `.gz` content is recognised.

    Args:
        paths: the files.
        file_format: None detects it, for each file.
        on_bad_line: "stop" raises at the first bad line; "skip" counts it and goes on.
        ignore_values: every value is taken as 1 (bad values stay bad lines).

    Attributes:
        skipped_lines: bad lines skipped in the latest pass.
        first_skipped: where the first of them is, and what was expected there.

    Iterating raises ValueError, naming file and line, at a bad line, a damaged gzip stream, or a
    file without any row.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        file_format: FileFormat | None = None,
        on_bad_line: Literal["stop", "skip"] = "stop",
        ignore_values: bool = False,
    ) -> None:
        self._paths = list(paths)
        self._file_format: FileFormat | None = file_format
        self._on_bad_line = on_bad_line
        self._ignore_values = ignore_values
        self._start_pass()

    def __iter__(self) -> Iterator[Batch]:
        self._start_pass()
        finished_bytes = 0
        for path in self._paths:
            yield from self._read_file(path, finished_bytes)
            finished_bytes += os.path.getsize(path)

    @property
    def estimated_rows(self) -> int | None:
        if self._rows_read == 0 or self._bytes_read == 0:
            return None
        total_bytes = sum(map(os.path.getsize, self._paths))
        return round(self._rows_read * total_bytes / self._bytes_read)

    def _start_pass(self) -> None:
        self.skipped_lines = 0
        self.first_skipped: str | None = None
        self._rows_read = 0
        self._bytes_read = 0

    def _read_file(self, path: Path, finished_bytes: int) -> Iterator[Batch]:
        file_format = self._file_format or _detect_file_format(path)
        rows_before, num_lines = self._rows_read, 0
        with _open_lines(path) as (lines, raw):
            while block := list(islice(lines, LINES_PER_BLOCK)):
                batch = self._parse_block(path, num_lines + 1, block, file_format)
                num_lines += len(block)
                self._rows_read += len(batch)
                self._bytes_read = finished_bytes + raw.tell()
                if len(batch) > 0:
                    yield self._with_values(batch)
        if num_lines == 0:
            raise ValueError(f"{path} is empty")
        if self._rows_read == rows_before:
            raise ValueError(f"{path} has no row: all of its {num_lines} lines are blank or bad")

    def _parse_block(self, path: Path, first_line: int, block: list[bytes], file_format: FileFormat) -> Batch:
        try:
            return parse_lines(block, file_format)
        except ValueError:
            # Some line is bad: go through the block line by line to find out which.
            good = [
                line for number, line in enumerate(block, first_line) if self._is_good(path, number, line, file_format)
            ]
            return parse_lines(good, file_format)

    def _is_good(self, path: Path, number: int, line: bytes, file_format: FileFormat) -> bool:
        try:
            parse_lines([line], file_format)
        except ValueError:
            message = f"{path}:{number}: {explain_bad_line(line, file_format)}"
            if self._on_bad_line == "stop":
                raise ValueError(message) from None
            self.skipped_lines += 1
            self.first_skipped = self.first_skipped or message
            return False
        return True

    def _with_values(self, batch: Batch) -> Batch:
        if not self._ignore_values:
            return batch
        return Batch(batch.ids, torch.ones_like(batch.values), batch.offsets, batch.labels)


class CachedRows:
    """Keeps a source's rows in memory after the first whole pass if they need at most `max_bytes`.

    Rows that need more are read from the source in every pass.
    """

    def __init__(self, source: RowSource, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._blocks: list[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._blocks is not None:
            yield from self._blocks
            return
        blocks: list[Batch] = []
        free_bytes = self._max_bytes
        for block in self._source:
            free_bytes -= block.nbytes
            if free_bytes >= 0:
                blocks.append(block)
            else:
                blocks.clear()
            yield block
        if free_bytes >= 0:
            self._blocks = blocks

    @property
    def estimated_rows(self) -> int | None:
        return self._source.estimated_rows


class HeldOutRows:
    """One part of a source split at random by row number: the validation rows, or all the others.

    A row's part depends on `seed` and its number alone, so that the two parts of one split are
    disjoint and complete in every pass.
    """

    def __init__(
        self,
        source: RowSource,
        fraction: float,
        *,
        seed: int,
        part: Literal["training", "validation"],
    ) -> None:
        self._source = source
        self._fraction = fraction
        self._seed = seed
        self._wanted = part == "validation"

    def __iter__(self) -> Iterator[Batch]:
        rng = np.random.default_rng(self._seed)
        for block in self._source:
            # One draw a row: the stream of draws does not depend on how rows are cut into blocks.
            held_out = rng.random(len(block)) < self._fraction
            chosen = torch.from_numpy(np.flatnonzero(held_out == self._wanted))
            if chosen.numel() > 0:
                yield block.take(chosen)

    @property
    def estimated_rows(self) -> int | None:
        total = self._source.estimated_rows
        share = self._fraction if self._wanted else 1 - self._fraction
        return None if total is None else round(total * share)


def regroup(blocks: Iterable[Batch], num_rows: int) -> Iterator[Batch]:
    """Cuts a stream anew into batches of `num_rows` rows; the last one has what is left."""
    pending: list[Batch] = []
    pending_rows = 0
    for block in blocks:
        pending.append(block)
        pending_rows += len(block)
        if pending_rows < num_rows:
            continue
        joined = concatenate(pending)
        whole = pending_rows - pending_rows % num_rows
        for start in range(0, whole, num_rows):
            yield joined.rows(start, start + num_rows)
        pending, pending_rows = [joined.rows(whole, pending_rows)], pending_rows - whole
    if pending_rows > 0:
        yield concatenate(pending)


def shuffled(blocks: Iterable[Batch], window_rows: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Permutes rows within consecutive windows of `window_rows`, the memory that this needs."""
    for window in regroup(blocks, window_rows):
        yield window.take(torch.from_numpy(rng.permutation(len(window))))


@contextmanager
def _open_lines(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a plain or gzip file; gives its lines and the file whose position shows progress."""
    with open(path, "rb") as raw:
        if raw.peek(2)[:2] != _GZIP_MAGIC:
            yield raw, raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) as unzipped:
                yield io.BufferedReader(unzipped), raw  # type: ignore[arg-type]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: the gzip stream is damaged ({error})") from error


def _detect_file_format(path: Path) -> FileFormat:
    with _open_lines(path) as (lines, _):
        return detect_format(islice(lines, LINES_PER_BLOCK))
