"""The rows of text files in any `RowFormat`, streamed: a block of lines is parsed at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from recstore_ops.training.rows.batch import Batch, concatenate
from recstore_ops.training.rows.compressed_file import open_input_file
from recstore_ops.training.rows.line_blocks import LineBlock, explain_overlong, line_blocks
from recstore_ops.training.rows.row_format import RowFormat, quote
from recstore_ops.training.rows.row_source import RowSource, SkippedRows, check_shard

OnBadLine = Literal["stop", "skip"]

# No format has these within a line, and what parses lines takes some of them for white space or for the end of a line.
_REFUSED_CHARACTERS = (b"\r", b"\0", b"\v", b"\f")


class TextRows(RowSource):
    """The rows of text files, one file after the other; compressed content is recognised.

    Args:
        paths: the files.
        row_format: of all of them.
        on_bad_line: "stop" raises at the first bad line; "skip" counts it and goes on.
        ignore_values: every value is taken as 1 (bad values stay bad lines).

    Iterating raises ValueError, naming file and line, at a bad line or a damaged compressed stream, and, naming the
    file, where a file has no row or the header of other columns.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        row_format: RowFormat,
        *,
        on_bad_line: OnBadLine = "stop",
        ignore_values: bool = False,
    ) -> None:
        self._paths = tuple(paths)
        self._row_format = row_format
        self._on_bad_line: OnBadLine = on_bad_line
        self._ignore_values = ignore_values
        self._shard = (0, 1)
        self._start_pass()

    def __iter__(self) -> Iterator[Batch]:
        self._start_pass()
        self._total_bytes = sum(map(os.path.getsize, self._paths))
        finished_bytes = 0
        for path in self._paths:
            yield from self._read_file(path, finished_bytes)
            finished_bytes += os.path.getsize(path)
            self._bytes_read = finished_bytes

    @property
    def estimated_rows(self) -> int | None:
        if self._rows_read == 0 or self._bytes_read == 0:
            return None
        return round(self._rows_read * self._total_bytes / self._bytes_read)

    @property
    def field_names(self) -> tuple[str, ...]:
        return self._row_format.field_names

    @property
    def dense_names(self) -> tuple[str, ...]:
        return self._row_format.dense_names

    @property
    def has_labels(self) -> bool:
        return self._row_format.has_labels

    @property
    def group_name(self) -> str | None:
        return self._row_format.group_name

    @property
    def skipped(self) -> tuple[SkippedRows, ...]:
        return tuple(self._skipped.values())

    def shard(self, index: int, count: int) -> TextRows:
        """Returns every `count`-th block of lines, from the `index`-th on; the others are read but not parsed."""
        check_shard(index, count)
        part = TextRows(self._paths, self._row_format, on_bad_line=self._on_bad_line, ignore_values=self._ignore_values)
        own_index, own_count = self._shard
        part._shard = (own_index + own_count * index, own_count * count)
        return part

    def _start_pass(self) -> None:
        self._skipped: dict[Path, SkippedRows] = {}
        self._rows_read = 0
        self._bytes_read = 0
        self._total_bytes = 0
        self._blocks_read = 0

    def _read_file(self, path: Path, finished_bytes: int) -> Iterator[Batch]:
        file_lines, own_lines, own_rows = 0, 0, 0
        with open_input_file(path) as file:
            for block in self._without_header(path, line_blocks(file)):
                file_lines += block.num_lines
                if not self._is_next_block_own():
                    continue
                batch = self._parse_block(path, block)
                own_lines += block.num_lines
                own_rows += len(batch)
                self._rows_read += len(batch)
                self._bytes_read = finished_bytes + file.position
                if len(batch) > 0:
                    yield batch
        if file_lines == 0:
            raise ValueError(f"{path} is empty")
        if own_rows == 0 and own_lines == file_lines:
            raise ValueError(f"{path} has no row: all of its {file_lines} lines are blank, bad or a header")

    def _is_next_block_own(self) -> bool:
        index, count = self._shard
        self._blocks_read += 1
        return (self._blocks_read - 1) % count == index

    def _without_header(self, path: Path, blocks: Iterator[LineBlock]) -> Iterator[LineBlock]:
        """Blanks the header, if the first line that is not blank is one, so that line numbers stay right."""
        for block in blocks:
            lines = block.text.lstrip(b" \t\n")
            if not lines:
                yield block
                continue
            header = lines[: lines.index(b"\n")]
            if self._is_header(path, block, header):
                block = replace(block, text=block.text.replace(header, b"", 1))
            yield block
            yield from blocks

    def _is_header(self, path: Path, block: LineBlock, line: bytes) -> bool:
        try:
            return self._row_format.is_header(line)
        except ValueError as error:
            number = block.first_line + block.text[: block.text.index(line)].count(b"\n")
            raise ValueError(f"{path}:{number}: {error}") from None

    def _parse_block(self, path: Path, block: LineBlock) -> Batch:
        def on_bad(number: int, line: bytes) -> None:
            self._meet_bad_line(path, number, line, block.overlong)

        def parse(lines: bytes) -> Batch:
            if block.overlong or any(character in lines for character in _REFUSED_CHARACTERS):
                raise ValueError("no format has such a line")
            return self._row_format.parse(lines)

        batches = list(_parse_good_lines(block.text, block.first_line, parse, on_bad))
        batch = concatenate(batches) if batches else self._row_format.parse(b"")
        return replace(batch, values=None) if self._ignore_values else batch

    def _meet_bad_line(self, path: Path, number: int, line: bytes, overlong: bool) -> None:
        before = self._skipped.get(path)
        if before is not None:
            self._skipped[path] = replace(before, count=before.count + 1)
            return
        message = f"{path}:{number}: {self._explain(line, overlong)}"
        if self._on_bad_line == "stop":
            raise ValueError(message)
        self._skipped[path] = SkippedRows(path, 1, message)

    def _explain(self, line: bytes, overlong: bool) -> str:
        if overlong:
            return explain_overlong(line)
        for character in _REFUSED_CHARACTERS:
            if character in line:
                return f"expected lines of text that end in LF or CRLF, got the byte {character!r} within {quote(line)}"
        return self._row_format.explain(line)


def _parse_good_lines(
    text: bytes,
    first_line: int,
    parse: Callable[[bytes], Batch],
    on_bad: Callable[[int, bytes], None],
) -> Iterator[Batch]:
    """Parses all lines together or, where that fails, each half alone, down to the bad lines."""
    try:
        batch = parse(text)
    except ValueError:
        cut = _middle(text)
    else:
        yield batch
        return
    if cut == 0:
        on_bad(first_line, text[:-1])
        return
    yield from _parse_good_lines(text[:cut], first_line, parse, on_bad)
    yield from _parse_good_lines(text[cut:], first_line + text.count(b"\n", 0, cut), parse, on_bad)


def _middle(text: bytes) -> int:
    """Returns the place near the middle where a line begins; 0 if there is but one line."""
    last = len(text) - 1
    after = text.find(b"\n", len(text) // 2, last) + 1
    return after or text.rfind(b"\n", 0, last) + 1
