"""Safetensors files, written piece by piece and read without loading them.

Neither direction needs the memory of the whole file. The package `safetensors` reads them. It writes only whole
tensors, so writing is done here: the length of a header (8 bytes, little-endian), the header (JSON: dtype, shape and
place of each tensor), and the tensors.

Source: https://github.com/huggingface/safetensors, "Format".
"""

import difflib
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recstore_ops.config.extras import imported
from recstore_ops.config.paths import replacing, user_path

TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
"""The types of tensors that are written, by their names in a header."""

_NAMES = {dtype: name for name, dtype in TYPES.items()}
_LENGTH_BYTES = 8
_MAX_NAMED = 20


@dataclass(frozen=True)
class Column:
    """A tensor to be written.

    Attributes:
        name: its name.
        dtype: its type.
        shape: its shape.
        parts: its rows in order, some at a time.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Iterable[Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Column":
        """A column of a tensor that is there as a whole."""
        return cls(name, tensor.dtype, tuple(tensor.shape), [tensor])

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: str | PathLike[str], columns: Sequence[Column]) -> dict[str, int]:
    """Writes a file, which appears under its name when it is complete.

    Args:
        path: the file; replaced if it is there.
        columns: the tensors. Those of wide elements come first, so that every tensor is aligned.

    Returns:
        The CRC-32 (IEEE 802.3) of the header, under `header`, and of each tensor.

    Raises:
        OSError: the file cannot be written.
        ValueError: the parts of a column do not add up to its shape.
    """
    with replacing([Path(user_path(path))]) as (beside,):
        return write_columns(beside, columns)


def write_columns(path: Path, columns: Sequence[Column]) -> dict[str, int]:
    """As `write_safetensors`, straight to the file: where that fails, a part of it is there."""
    columns = sorted(columns, key=lambda column: -column.dtype.itemsize)
    header = _header(columns)
    checksums = {"header": zlib.crc32(header)}
    with path.open("wb") as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for column in columns:
            checksums[column.name] = _write_column(file, column)
    return checksums


def _header(columns: Sequence[Column]) -> bytes:
    entries, start = {}, 0
    for column in columns:
        entries[column.name] = _entry(column, start, start + column.nbytes)
        start += column.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Blanks fill it up, so that the tensors behind it begin at a multiple of eight bytes.
    return text.ljust(-(-len(text) // 8) * 8)


def _entry(column: Column, start: int, end: int) -> dict[str, Any]:
    return {"dtype": _NAMES[column.dtype], "shape": column.shape, "data_offsets": [start, end]}


def most_header_bytes(columns: Sequence[Column], most: int) -> int:
    """The most bytes that a file of at most `most` bytes has before these tensors."""
    # With offsets as long as they get.
    text = json.dumps({column.name: _entry(column, most, most) for column in columns}, separators=(",", ":"))
    return _LENGTH_BYTES + -(-len(text.encode()) // 8) * 8


def bytes_of_tensors(path: Path) -> int:
    """The size of all tensors of a file, by the length of its header."""
    check_regular(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    return path.stat().st_size - _LENGTH_BYTES - length


def _write_column(file: Any, column: Column) -> int:
    checksum = written = 0
    for part in column.parts:
        # As bytes: numpy has no bfloat16.
        buffer = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        checksum = zlib.crc32(buffer, checksum)
        written += file.write(buffer)
    if written != column.nbytes:
        raise ValueError(f'tensor "{column.name}" has {column.nbytes} bytes by its shape, got {written}')
    return checksum


def check_regular(path: str | PathLike[str]) -> None:
    """Checks that opening a file does not wait for a writer; a link may lead to it.

    Raises:
        OSError: it is not there, or a FIFO, a socket or a device.
    """
    mode = os.stat(path).st_mode
    # What a directory is, is said when it is opened.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(f"{os.fspath(path)}: expected a regular file, got a FIFO, a socket or a device")


class SafetensorsFile:
    """A file's tensors, mapped into memory: what is not looked at is not read.

    Args:
        path: the file.

    Raises:
        OSError: there is no such file, or it is no regular one.
        ValueError: it is no safetensors file; names the file and what is wrong with it.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = user_path(path)
        check_regular(self.path)
        with open(self.path, "rb"):  # What the system refuses, Python reports with the file's name.
            pass
        safetensors = imported("safetensors", "train", f"the safetensors file {self.path}")
        self._error: type[Exception] = safetensors.SafetensorError
        try:
            self._file = safetensors.safe_open(self.path, framework="pt")
        except self._error as error:
            raise ValueError(f"{self.path} is not a safetensors file: {error}") from None

    def names(self) -> list[str]:
        """The names of the tensors, sorted."""
        return sorted(self._file.keys())

    def tensor(self, name: str) -> Tensor:
        """A tensor, read as it is looked at.

        Raises:
            ValueError: there is none of this name, and then it names those that there are; or torch has no such type.
        """
        if name not in self.names():
            raise without_tensor(self.path, name, self.names())
        try:
            return self._file.get_tensor(name)
        except self._error as error:
            raise ValueError(f'the tensor "{name}" of {self.path} cannot be read: {error}') from None


def without_tensor(path: object, name: str, names: list[str]) -> ValueError:
    """The error of a tensor that is not there, with those that are, or some of very many."""
    nearest = difflib.get_close_matches(name, names, _MAX_NAMED, cutoff=0) if len(names) > _MAX_NAMED else names
    more = f" and {len(names) - len(nearest)} more" if len(names) > len(nearest) else ""
    return ValueError(f'{path} has no tensor "{name}", but {nearest}{more}')
