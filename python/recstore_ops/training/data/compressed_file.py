"""Files read as their uncompressed bytes. A file's first bytes decide how it is compressed, not its name.

The modules for bz2 and xz files end silently at bytes after the first stream that are no stream. In a file of several
streams that would lose rows. So here every byte must belong to a complete stream.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Protocol

import pyarrow as pa

_COMPRESSED_BYTES = 2**16
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, pa.ArrowInvalid)


class DamagedStreamError(ValueError):
    """A compressed stream that is truncated or corrupt; the message names its kind."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class InputFile:
    """An open file as its uncompressed bytes."""

    def __init__(self, path: Path, raw: BufferedReader, kind: str | None, stream: _Readable) -> None:
        self.path = path
        self._raw = raw
        self._kind = kind
        self._stream = stream

    @property
    def position(self) -> int:
        """Bytes read of the file as it is on the disk."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes, none only at the end.

        Raises:
            DamagedStreamError: the compressed stream is cut or corrupt.
            OSError: the disk or the network failed.
        """
        try:
            return self._stream.read(size)
        except _DAMAGE as error:
            # Only what the system refused has a number; an OSError without one is a decompressor's.
            if self._kind is None or getattr(error, "errno", None) is not None:
                raise
            raise DamagedStreamError(f"the {self._kind} stream is damaged ({error})") from error

    def read_into(self, buffer: bytearray) -> int:
        """Fills the beginning of `buffer`, and returns with how many bytes, none only at the end; errors as `read`."""
        if self._stream is self._raw:
            return self._raw.readinto(buffer)
        content = self.read(len(buffer))
        memoryview(buffer)[: len(content)] = content
        return len(content)


@contextmanager
def open_input_file(path: Path) -> Iterator[InputFile]:
    """Opens a plain, gzip, bz2, xz, zstd or lz4 file, or a zip archive of one file.

    Raises:
        ValueError: a zip archive is cut, or has several files or none.
    """
    with open(path, "rb") as raw:
        # `peek` reads nothing away from the stream that is opened next.
        start = raw.peek(8)
        for magic, kind, open_stream in _KINDS:
            if start.startswith(magic):
                yield InputFile(path, raw, kind, open_stream(raw))
                return
        yield InputFile(path, raw, None, raw)


def read_start(path: Path, size: int) -> bytes:
    """Returns the first `size` bytes of a file, or all of a shorter one.

    Raises:
        ValueError: its compressed stream is damaged.
    """
    start = b""
    with open_input_file(path) as file:
        try:
            while len(start) < size and (read := file.read(size - len(start))):
                start += read
        except DamagedStreamError as error:
            raise ValueError(f"{path}:1: {error}, in this line or after it") from error
    return start


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _StreamsInARow:
    """The bytes of one or more compressed streams, one after the other, with zeros between them or none."""

    def __init__(self, raw: BinaryIO, new_decompressor: Callable[[], _Decompressor]) -> None:
        self._raw = raw
        self._new_decompressor = new_decompressor
        self._decompressor = new_decompressor()

    def read(self, size: int) -> bytes:
        while True:
            compressed = b""
            if self._decompressor.eof:
                compressed = self._next_stream()
                if not compressed:
                    return b""
            elif self._decompressor.needs_input:
                compressed = self._raw.read(_COMPRESSED_BYTES)
                if not compressed:
                    raise EOFError("the file ends before the stream")
            # To callers an empty result is the end of the file, so this goes on until there is something.
            if content := self._decompressor.decompress(compressed, size):
                return content

    def _next_stream(self) -> bytes:
        """Begins the stream after a finished one; returns what is read of it, nothing at the end of the file."""
        rest = self._decompressor.unused_data.lstrip(b"\0")
        while not rest:
            read = self._raw.read(_COMPRESSED_BYTES)
            if not read:
                return b""
            rest = read.lstrip(b"\0")
        self._decompressor = self._new_decompressor()
        return rest


def _gzip_stream(raw: BinaryIO) -> _Readable:
    return gzip.GzipFile(fileobj=raw)


def _bz2_stream(raw: BinaryIO) -> _Readable:
    return _StreamsInARow(raw, bz2.BZ2Decompressor)


def _xz_stream(raw: BinaryIO) -> _Readable:
    return _StreamsInARow(raw, lzma.LZMADecompressor)


def _zstd_stream(raw: BinaryIO) -> _Readable:
    return pa.CompressedInputStream(raw, "zstd")


def _zip_stream(raw: BinaryIO) -> _Readable:
    try:
        archive = zipfile.ZipFile(raw)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{raw.name}: the zip archive is damaged ({error})") from error
    names = [member.filename for member in archive.infolist() if not member.is_dir()]
    if len(names) != 1:
        raise ValueError(f"{raw.name}: expected a zip archive of one file, got {', '.join(names) or 'none'}")
    return archive.open(names[0])


def _lz4_stream(raw: BinaryIO) -> _Readable:
    return pa.CompressedInputStream(raw, "lz4")


_KINDS: tuple[tuple[bytes, str, Callable[[BinaryIO], _Readable]], ...] = (
    (b"\x1f\x8b", "gzip", _gzip_stream),
    (b"PK\x03\x04", "zip", _zip_stream),
    (b"PK\x05\x06", "zip", _zip_stream),  # an archive without a file
    (b"BZh", "bz2", _bz2_stream),
    (b"\xfd7zXZ\0", "xz", _xz_stream),
    (b"\x28\xb5\x2f\xfd", "zstd", _zstd_stream),
    (b"\x50\x2a\x4d\x18", "zstd", _zstd_stream),  # the skippable frame that pzstd begins with
    (b"\x04\x22\x4d\x18", "lz4", _lz4_stream),
)
