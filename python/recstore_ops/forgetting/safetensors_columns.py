"""Ids in safetensors files: the tensors of 64-bit integers, and the ids of frozen tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from recstore_ops.config.directory import Directory
from recstore_ops.forgetting.id_set import Found, IdSet

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
_FROZEN = "recstore frozen table"
_NO_IDS = ("usage.step", "usage.count")
_IDS_A_LINE = 7
_LINES_AT_A_TIME = 1 << 17


class NoSafetensors(ValueError):
    """A file is of another format."""


def in_safetensors(file: BinaryIO, ids: IdSet, tables: frozenset[str]) -> Found:
    """Returns how often each id is in the tensors of 64-bit integers of a file, which is read to its end.

    Args:
        file: any safetensors, also a file of a checkpoint or a frozen table.
        ids: which.
        tables: those whose ids they are: a frozen table of another name has others.

    Raises:
        NoSafetensors: the file is something else.
        EOFError: it is cut off.
    """
    header = _header(file)
    table = _frozen_table(header)
    if table is not None and table not in tables:
        return Found()
    found, place = Found(), 0
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = tensor["data_offsets"]
        if tensor["dtype"] in ("I64", "U64") and name not in _NO_IDS:
            _skip(file, begin - place)
            for part in _parts(file, end - begin):
                numbers = np.frombuffer(part, "<i8")
                found += ids.among(numbers if table is None else _ids_of(numbers))
            place = end
    return found


def frozen_ids(path: Path) -> Iterator[NDArray[np.int64]]:
    """Yields the ids of a frozen table, in parts; raises OSError where the file is cut off."""
    try:
        with Directory(path.parent) as directory, directory.open(path.name) as file:
            begin, end = _header(file)["ids"]["data_offsets"]
            _skip(file, begin)
            yield from (_ids_of(np.frombuffer(part, "<i8")) for part in _parts(file, end - begin))
    except (NoSafetensors, EOFError, KeyError) as error:
        raise OSError(f"{path} is no frozen table: {error}") from None


def _ids_of(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of lines, each of up to 7 and a word with their number in its upper half."""
    lines = words.reshape(-1, _IDS_A_LINE + 1)
    counts = lines[:, _IDS_A_LINE] >> 32
    return lines[:, :_IDS_A_LINE][np.arange(_IDS_A_LINE) < counts[:, None]]


def _header(file: BinaryIO) -> dict[str, Any]:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 2 <= length <= _LONGEST_HEADER:
        raise NoSafetensors("it has no header of safetensors")
    try:
        header = json.loads(file.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        _ = [(tensor["dtype"], *tensor["data_offsets"]) for tensor in tensors]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NoSafetensors("it has no header of safetensors") from None
    return header


def _frozen_table(header: dict[str, Any]) -> str | None:
    """The name of the table that a file freezes."""
    metadata = header.get("__metadata__") or {}
    return json.loads(metadata["table"])["name"] if metadata.get("format") == _FROZEN else None


def _skip(file: BinaryIO, count: int) -> None:
    for _ in _parts(file, count):
        pass


def _parts(file: BinaryIO, count: int) -> Iterator[bytes]:
    """The next bytes of a file, in parts of whole lines."""
    most = _LINES_AT_A_TIME * (_IDS_A_LINE + 1) * 8
    while count > 0:
        part = file.read(min(count, most))
        if len(part) < min(count, most):
            raise EOFError("it is cut off")
        yield part
        count -= len(part)


__all__ = ["NoSafetensors", "frozen_ids", "in_safetensors"]
