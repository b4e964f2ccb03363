"""Tensors in several safetensors files, and the index that lists the file of each.

The index is JSON: `{"metadata": {"total_size": BYTES}, "weight_map": {TENSOR: FILE}}`, its files beside it.

Source: https://huggingface.co/docs/transformers/main/en/models#sharded-checkpoints
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from recstore_ops.config.distinct_keys import distinct_keys
from recstore_ops.config.paths import user_path
from recstore_ops.transfer.safetensors_file import (
    Column,
    SafetensorsFile,
    bytes_of_tensors,
    check_regular,
    most_header_bytes,
    without_tensor,
    write_columns,
)

INDEX = "model.safetensors.index.json"
"""The name of an index that is written."""

_ENDING = ".safetensors.index.json"
_ALONE = "model.safetensors"


class SafetensorsIndex:
    """The tensors of several files, each file opened when one of its tensors is asked for.

    Args:
        path: the index.

    Raises:
        OSError: there is no such file, or it is no regular one.
        ValueError: it is no index, or names a tensor twice.

    Warns:
        UserWarning: the files are all there, and their tensors have not the size together that the index says.
            Published models are found whose index is wrong in this, so it is no error.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = user_path(path)
        self._folder = Path(self.path).parent
        self._places, total_size = _read(self.path)
        self._opened: dict[str, SafetensorsFile] = {}
        self._compare_size(total_size)

    def names(self) -> list[str]:
        """The names of the tensors, sorted."""
        return sorted(self._places)

    def tensor(self, name: str) -> Tensor:
        """A tensor, read as it is looked at.

        Raises:
            FileNotFoundError: the file that it lies in by the index is not there.
            ValueError: there is none of this name; or the file is none, or holds other tensors than the index says.
        """
        if name not in self._places:
            raise without_tensor(self.path, name, self.names())
        file = self._places[name]
        if file not in self._opened:
            self._opened[file] = self._open(file, name)
        return self._opened[file].tensor(name)

    def _open(self, file: str, name: str) -> SafetensorsFile:
        path = self._folder / file
        if not path.exists():
            raise FileNotFoundError(f'the tensor "{name}" lies in {path} by {self.path}, but there is no such file')
        opened = SafetensorsFile(path)
        found = opened.names()
        missing = sorted(each for each, place in self._places.items() if place == file and each not in found)
        if missing:
            raise ValueError(f"{self.path} says that {path} holds {missing}, but it holds {found}")
        # The two tensors may differ, and the index would choose between them without a word.
        for each in found:
            if self._places.get(each, file) != file:
                raise ValueError(f'the tensor "{each}" lies in {self._places[each]} by {self.path}, and in {path} too')
        return opened

    def _compare_size(self, expected: Any) -> None:
        # Files may be there in part: only those of the tensors that are asked for are needed.
        paths = [self._folder / file for file in sorted(set(self._places.values()))]
        if expected is None or not all(path.exists() for path in paths):
            return
        found = sum(map(bytes_of_tensors, paths))
        if found != expected:
            warnings.warn(
                f"the tensors have {expected} bytes by {self.path}, but those of its {len(paths)} files have {found}",
                stacklevel=5,
            )


def open_safetensors(path: str | PathLike[str]) -> SafetensorsFile | SafetensorsIndex:
    """Opens a file, several files by their index, or the one index in a directory.

    A directory without an index may have one file, `model.safetensors`, instead.

    Raises:
        OSError: there is no such file, or none of these in the directory.
        ValueError: several indexes in the directory; further as `SafetensorsFile` and `SafetensorsIndex`.
    """
    path = user_path(path)
    if not os.path.isdir(path):
        return SafetensorsIndex(path) if path.endswith(".json") else SafetensorsFile(path)
    there = sorted(os.listdir(path))
    indexes = [name for name in there if name.endswith(_ENDING)]
    if len(indexes) > 1:
        raise ValueError(f"{path} has the indexes {indexes}: give the path of one")
    if indexes:
        return SafetensorsIndex(os.path.join(path, indexes[0]))
    if _ALONE in there:
        return SafetensorsFile(os.path.join(path, _ALONE))
    raise FileNotFoundError(f"{path} has neither an index, *{_ENDING}, nor {_ALONE}, but {there}")


def _read(path: str) -> tuple[dict[str, str], Any]:
    """The file of each tensor, and the size of all."""
    check_regular(path)
    try:
        # By itself json.loads keeps the last of two equal keys, and the first file would be forgotten.
        index = json.loads(Path(path).read_bytes(), object_pairs_hook=distinct_keys(_twice))
        places, metadata = index["weight_map"], index.get("metadata") or {}
        total_size = metadata.get("total_size")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: {type(error).__name__}: {error}") from None
    if not isinstance(places, dict):
        raise ValueError(f"{path}: weight_map must be an object, got {type(places).__name__}")
    for tensor, file in places.items():
        # A plain name: the files lie beside the index, and no path leads elsewhere.
        if not isinstance(file, str) or not file.endswith(".safetensors") or os.path.basename(file) != file:
            raise ValueError(f'{path}: expected the name of a safetensors file for "{tensor}", got {file!r}')
    return places, total_size


def _twice(name: str, first: Any, second: Any) -> ValueError:
    return ValueError(f'"{name}" is there twice, for {first!r} and {second!r}')


_LEFT_BEHIND = re.compile(r"model(-\d{5,}-of-\d{5,}\.safetensors|\.safetensors\.index\.json)\.new")
"""The names of files that a killed export leaves."""


@dataclass(frozen=True)
class Splittable:
    """Tensors with a row each for the same things, which may be cut between any two of these rows.

    Attributes:
        name: what messages call them.
        rows: the number of rows.
        columns: the tensors with the rows `first` to `end - 1`.
    """

    name: str
    rows: int
    columns: Callable[[int, int], list[Column]]


def write_shards(path: str | PathLike[str], tensors: Sequence[Splittable], max_shard_size: int) -> None:
    """Writes files `model-00001-of-0000N.safetensors` and their index, which appears last.

    Files follow the order of the tensors. Tensors that fit into one file are not split.

    Args:
        path: the directory; made if it is not there.
        tensors: the tensors.
        max_shard_size: the most bytes of a file.

    Raises:
        FileExistsError: the directory holds something, or is a file.
        OSError: a file cannot be written; then there is none.
        ValueError: a row does not fit into a file.
    """
    shards = _shards(tensors, max_shard_size)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    directory = Path(user_path(path))
    is_made = not directory.exists()
    directory.mkdir(exist_ok=True)
    _check_is_free(directory)
    beside = [(directory / f"{name}.new", directory / name) for name in (*files, INDEX)]
    try:
        for (new, _), columns in zip(beside[:-1], shards, strict=True):
            write_columns(new, columns)
        beside[-1][0].write_text(_index(files, shards), "utf-8")
        # The index is the last of them: a reader that finds it finds every file that it lists.
        for new, final in beside:
            new.replace(final)
    except BaseException:
        for new, _ in beside:
            new.unlink(missing_ok=True)
        if is_made and not any(directory.iterdir()):
            directory.rmdir()
        raise


def _check_is_free(directory: Path) -> None:
    there = sorted(path.name for path in directory.iterdir())
    others = [name for name in there if not _LEFT_BEHIND.fullmatch(name)]
    if others:
        raise FileExistsError(f"{directory} must be new or empty for files of an export, but it holds {others}")
    # Unfinished files of a killed export are all that is left, and no reader takes a name that ends in `.new`.
    for name in there:
        (directory / name).unlink()


def _index(files: list[str], shards: list[list[Column]]) -> str:
    total_size = sum(column.nbytes for columns in shards for column in columns)
    places = {column.name: file for file, columns in zip(files, shards, strict=True) for column in columns}
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": dict(sorted(places.items()))}, indent=2)


def _shards(tensors: Sequence[Splittable], most: int) -> list[list[Column]]:
    """The tensors of each file."""
    shards: list[list[Column]] = []
    for each in tensors:
        whole = each.columns(0, each.rows)
        if shards and _file_bytes([*shards[-1], *whole], most) <= most:
            shards[-1].extend(whole)
        elif _file_bytes(whole, most) <= most:
            shards.append(whole)
        else:
            count = _rows_of_a_file(each, most)
            shards += [each.columns(at, min(at + count, each.rows)) for at in range(0, each.rows, count)]
    return shards


def _rows_of_a_file(tensors: Splittable, most: int) -> int:
    """How many rows fit into a file."""

    def nbytes(count: int) -> int:  # Of the last ones: no part has a longer name.
        return _file_bytes(tensors.columns(tensors.rows - count, tensors.rows), most)

    # A table of at most one row is refused here: it came because as a whole it does not fit into a file.
    least = nbytes(min(1, tensors.rows))
    if least > most:
        raise ValueError(
            f'max_shard_size must be at least {least} for a row of table "{tensors.name}" and its header, got {most}'
        )
    count = 1 + (most - least) // (nbytes(2) - least)
    while nbytes(count) > most:  # The header grows with the number of rows, by some bytes.
        count -= 1
    return count


def _file_bytes(columns: Sequence[Column], most: int) -> int:
    return most_header_bytes(columns, most) + sum(column.nbytes for column in columns)
