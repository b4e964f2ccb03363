"""Cuts a file into blocks of whole lines, in memory bounded by the longest line that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recstore_ops.training.rows.compressed_file import DamagedStreamError, InputFile, open_input_file
from recstore_ops.training.rows.row_format import quote

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
            start.append(bytes(chunk[cut:]))
    if start:
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
