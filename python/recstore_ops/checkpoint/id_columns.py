"""The columns of ids in the files of a checkpoint, read without tables and with little memory."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from recstore_ops.config.directory import Directory
from recstore_ops.config.extras import imported

ID_COLUMNS = ("deleted_ids", "admission.ids", "eviction.ids", "ids")
"""Those that a file may have."""

SKETCH = "admission.counts"
"""The counters of a sketch, where there is one."""

_TYPES = {"I64": np.dtype("<i8"), "U32": np.dtype("<u4")}
_LENGTH_BYTES = 8
_BYTES_AT_A_TIME = 1 << 23


def id_columns(
    directory: Directory, entry: dict[str, Any], names: Sequence[str] = ID_COLUMNS
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the columns `names` that a file has, in parts: the name, and some values in their order.

    Args:
        directory: where the file is.
        entry: what the manifest says of it.
        names: of columns.

    Raises:
        RuntimeError: the file is missing, or not what the manifest says; the message names it.
    """
    try:
        with plain_file(directory, entry) as (file, _):
            yield from _columns(file, entry["checksums"], names)
    except OSError as error:
        raise RuntimeError(f"checkpoint: {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RuntimeError(f"checkpoint: {directory.path / entry['file']}: {error}") from None


def _columns(file: BinaryIO, checksums: dict[str, int], names: Sequence[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    header = file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))
    if zlib.crc32(header) != checksums["header"]:
        raise ValueError("its header was changed: the checksum is another")
    wanted = {name: tensor for name, tensor in json.loads(header).items() if name in names}
    place = 0
    for name, tensor in sorted(wanted.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = tensor["data_offsets"]
        for _ in _parts(file, begin - place):
            pass
        place, checksum = end, 0
        for part in _parts(file, end - begin):
            checksum = zlib.crc32(part, checksum)
            yield name, np.frombuffer(part, _TYPES[tensor["dtype"]])
        if checksum != checksums[name]:
            raise ValueError(f'its tensor "{name}" was changed: the checksum is another')


def _parts(file: BinaryIO, count: int) -> Iterator[bytes]:
    while count > 0:
        part = file.read(min(count, _BYTES_AT_A_TIME))
        if len(part) < min(count, _BYTES_AT_A_TIME):
            raise ValueError("it ends within a tensor")
        yield part
        count -= len(part)


@contextmanager
def plain_file(directory: Directory, entry: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """The plain file that an entry of the manifest lists, to be read from its beginning to its end, and its length.

    Raises:
        OSError: it is missing, or no regular file.
        ValueError: it has another length than the entry says.
    """
    with directory.open(entry["file"]) as file:
        found = os.fstat(file.fileno()).st_size
        if found != entry["bytes"]:
            raise ValueError(f"it has {found:,} bytes, not {entry['bytes']:,}")
        if "compressed" not in entry:
            yield file, entry["bytes"]
            return
        pyarrow = imported("pyarrow", "train", "a compressed checkpoint's verification")
        with pyarrow.CompressedInputStream(file, entry["compressed"]["kind"]) as plain:
            yield plain, entry["compressed"]["bytes"]


__all__ = ["ID_COLUMNS", "SKETCH", "id_columns"]
