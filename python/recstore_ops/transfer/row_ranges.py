"""Tensors whose rows are split: `NAME[FIRST:END]` holds the rows FIRST to END - 1 of `NAME`."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from recstore_ops.config.progress_bars import Bar, progress_bar

# How a user sees that rows are moved.
#
# Shape suffix: N ids.


def as_tensor(ids: Tensor | range) -> Tensor:
    """Ids, `[N]`."""
    return ids if isinstance(ids, Tensor) else torch.arange(ids.start, ids.stop, dtype=torch.int64, device="cpu")


def bar_of_rows(what: str, rows: int, progress: bool | None) -> Bar:
    """A progress bar; by default if the standard error is a terminal or a notebook."""
    return progress_bar(progress, total=rows, desc=what, unit="row", unit_scale=True)


_RANGED = re.compile(r"(.+)\[(\d+):(\d+)\]", re.DOTALL)


class RowRange(NamedTuple):
    """A tensor with some of the rows of another.

    Attributes:
        tensor: its own name.
        name: the name of that which it is a part of.
        first: the place of its first row.
        end: the place behind its last row.
    """

    tensor: str
    name: str
    first: int
    end: int


def ranged_name(name: str, first: int, end: int) -> str:
    """The name of the tensor with these rows of `name`."""
    return f"{name}[{first}:{end}]"


def row_ranges(tensors: Collection[str]) -> dict[str, list[RowRange]]:
    """The tensors among these that hold a part of the rows of something, by its name, in the order of the rows."""
    found: dict[str, list[RowRange]] = {}
    for tensor in tensors:
        if match := _RANGED.fullmatch(tensor):
            part = RowRange(tensor, match[1], int(match[2]), int(match[3]))
            found.setdefault(part.name, []).append(part)
    return {name: sorted(parts, key=lambda part: (part.first, part.end)) for name, parts in found.items()}


def check_rows_follow(parts: list[RowRange], where: object) -> None:
    """Checks that parts hold every row once.

    Raises:
        ValueError: rows that none holds or that two hold; names `where` and the tensor.
    """
    expected = 0
    for part in parts:
        if part.first != expected or part.end < part.first:
            raise ValueError(
                f'{where}: the next part of "{part.name}" must begin at row {expected}, got "{part.tensor}"'
            )
        expected = part.end
