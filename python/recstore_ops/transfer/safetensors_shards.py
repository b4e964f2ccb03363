"""Rows written to several safetensors files of a bounded size, with an index of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from recstore_ops.config.paths import user_path
from recstore_ops.transfer.safetensors_file import Column, most_header_bytes, write_columns
from recstore_ops.transfer.safetensors_index import INDEX

_LEFT_BEHIND = re.compile(r"model(-\d{5,}-of-\d{5,}\.safetensors|\.safetensors\.index\.json)\.new")
"""What an export that was killed leaves."""


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

    What fits into one file is not split, in the order in which it is given.

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
