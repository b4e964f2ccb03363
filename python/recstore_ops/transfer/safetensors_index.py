"""Tensors that lie in several safetensors files, and the index that says which lies where.

The index is JSON: `{"metadata": {"total_size": BYTES}, "weight_map": {TENSOR: FILE}}`, its files beside it.

Source: https://huggingface.co/docs/transformers/main/en/models#sharded-checkpoints
"""

from __future__ import annotations

import json
import os
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from recstore_ops.config.distinct_keys import distinct_keys
from recstore_ops.config.paths import user_path
from recstore_ops.transfer.safetensors_file import SafetensorsFile, bytes_of_tensors, without_tensor

INDEX = "model.safetensors.index.json"
"""The name of an index that is written."""

_ENDING = ".safetensors.index.json"
_ALONE = "model.safetensors"


class SafetensorsIndex:
    """The tensors of several files, each file opened when one of its tensors is asked for.

    Args:
        path: the index.

    Raises:
        OSError: there is no such file.
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
        for each in found:
            if self._places.get(each, file) != file:
                raise ValueError(f'the tensor "{each}" lies in {self._places[each]} by {self.path}, and in {path} too')
        return opened

    def _compare_size(self, expected: Any) -> None:
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
    try:
        index = json.loads(Path(path).read_bytes(), object_pairs_hook=distinct_keys(_twice))
        places, metadata = index["weight_map"], index.get("metadata") or {}
        total_size = metadata.get("total_size")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: {type(error).__name__}: {error}") from None
    if not isinstance(places, dict):
        raise ValueError(f"{path}: weight_map must be an object, got {type(places).__name__}")
    for tensor, file in places.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or os.path.basename(file) != file:
            raise ValueError(f'{path}: expected the name of a safetensors file for "{tensor}", got {file!r}')
    return places, total_size


def _twice(name: str, first: Any, second: Any) -> ValueError:
    return ValueError(f'"{name}" is there twice, for {first!r} and {second!r}')
