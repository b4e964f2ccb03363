"""The rows of text files in any `RowFormat`, streamed: a block of lines is parsed at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from recstore_ops.training.data.batch import Batch, concatenate
from recstore_ops.training.data.compressed_file import DamagedStreamError, InputFile, open_input_file
from recstore_ops.training.data.row_format import RowFormat, quote
from recstore_ops.training.data.row_source import RowSource, SkippedRows, check_shard

BLOCK_BYTES = 2**19  # larger ones do not stay in the second-level cache from one step of parsing to the next
MAX_LINE_BYTES = 2**24  # not less than BLOCK_BYTES
_KEPT_OF_OVERLONG_LINE = 64
_FIRST_BYTES = 2**22
_LINE_FEED = ord("\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LineBlock:
    """Lines that follow each other in a file.

    Attributes:
        first_line: the number of the first one in the file, from 1.
        text: the lines, each with LF at its end (CRLF and a missing end of the last line are made LF).
        num_lines: how many they are.
        overlong: the block is one line of more than `MAX_LINE_BYTES`, of which `text` is the beginning.
    """

    first_line: int
    text: bytes
    num_lines: int
    overlong: bool


def line_blocks(file: InputFile) -> Iterator[LineBlock]:
    """Reads a file to its end; a byte order mark at its beginning is passed over.

    Raises:
        ValueError: a compressed stream is damaged; the message names the file and the line reached.
    """
    next_line = 1
    try:
        for text, overlong in _whole_lines(_chunks(file)):
            num_lines = _lines_of(text)
            yield LineBlock(next_line, _normalized(text, next_line), num_lines, overlong)
            next_line += num_lines
    except DamagedStreamError as error:
        raise ValueError(f"{file.path}:{next_line}: {error}, in this line or after it") from error


def first_lines(path: Path, count: int) -> list[bytes]:
    """Returns at most `count` lines from the beginning of a file, without their ends, as far as 4 MiB go.

    Raises:
        ValueError: as `line_blocks` does.
    """
    lines: list[bytes] = []
    num_bytes = 0
    with open_input_file(path) as file:
        for block in line_blocks(file):
            lines += [] if block.overlong else block.text.split(b"\n")[:-1]
            num_bytes += len(block.text)
            if len(lines) >= count or num_bytes >= _FIRST_BYTES:
                break
    return lines[:count]


def explain_overlong(line: bytes) -> str:
    """Says what was expected instead of an overlong line that begins like `line`."""
    return f"expected a line of at most {MAX_LINE_BYTES} bytes, got a longer one that begins with {quote(line)}"


class _LineStart:
    """The beginning of a line whose end is not read yet; of an overlong line only a few bytes are kept."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def append(self, piece: bytes) -> None:
        self._size += len(piece)
        self._pieces.append(piece)
        if self._size > MAX_LINE_BYTES:
            self._pieces = [b"".join(self._pieces)[:_KEPT_OF_OVERLONG_LINE]]

    def finish(self, lines: memoryview, end_of_line: int) -> Iterator[tuple[bytes, bool]]:
        """Takes whole lines, the first of which is the rest of this one, of `end_of_line` bytes.

        Gives texts, and whether each is an overlong line.
        """
        if self._size + end_of_line > MAX_LINE_BYTES:
            self.append(bytes(lines[:end_of_line]))
            yield b"".join(self._pieces) + b"\n", True
            lines = lines[end_of_line + 1 :]
            self._pieces = []
        if lines:
            yield b"".join([*self._pieces, lines]), False
        self._pieces, self._size = [], 0

    def __bool__(self) -> bool:
        return self._size > 0


def _lines_of(text: bytes) -> int:
    # Several times as fast as bytes.count, which begins anew behind each line.
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == _LINE_FEED))


def _whole_lines(chunks: Iterator[bytearray]) -> Iterator[tuple[bytes, bool]]:
    start = _LineStart()
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut > 0:
            yield from start.finish(memoryview(chunk)[:cut], chunk.index(b"\n"))
        if cut < len(chunk):
            # A copy: the next chunk comes in the same memory.
            start.append(bytes(chunk[cut:]))
    if start:
        # A last line without an end gets one, so that every block ends with a line feed.
        yield from start.finish(memoryview(b"\n"), 0)


def _chunks(file: InputFile) -> Iterator[bytearray]:
    """Gives the file piece by piece, all in the same memory: each is gone when the next one is asked for."""
    chunk = bytearray(BLOCK_BYTES)
    while (size := file.read_into(chunk)) > 0:
        yield chunk if size == len(chunk) else chunk[:size]


def _normalized(text: bytes, first_line: int) -> bytes:
    if first_line == 1:
        text = text.removeprefix(_BYTE_ORDER_MARK)
    return text.replace(b"\r\n", b"\n") if b"\r" in text else text


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

    Iterating raises ValueError, naming file and line, at a bad line or a damaged compressed stream. It also raises
    ValueError, naming the file, if a file has no row or the header of other columns.
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
        # A shard may have no row of a file of which others have some.
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
    """Parses all lines together or, if that fails, each half alone, down to the bad lines."""
    try:
        # Bad lines are few. Halving finds each in as many parses as the logarithm of the lines.
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
    """Returns the beginning of a line near the middle; 0 if there is only one line."""
    last = len(text) - 1
    after = text.find(b"\n", len(text) // 2, last) + 1
    return after or text.rfind(b"\n", 0, last) + 1
