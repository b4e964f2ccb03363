"""The ids that are looked for, as people write them and in the forms in which files have them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recstore_ops.table.checks import as_ids

Match = Counter[int]
"""How often each id was found."""

# `7.0` is the 7 of a column with gaps; `7.5`, `x7` and `0.7` are others. The hyphen of `a-7` is no sign.
_NUMBER = re.compile(rb"(?<![\w.])(-?[0-9]+)(?:\.0+)?(?!\w|\.[0-9])")

_BETWEEN, _ID = re.compile(r"[\s,]+"), re.compile(r"-?[0-9]+")

_FEWEST_DIGITS = 2**31
"""An id below comes in files by chance: as a count, a size, four bytes beside four zeros."""


class IdSet:
    """Distinct int64 ids.

    Args:
        ids: integers, or a tensor or array of them; each may come several times.

    Attributes:
        values: int64, ascending.

    Raises:
        TypeError: something else than integers.
        ValueError: no ids, or one that int64 has not.
    """

    def __init__(self, ids: Iterable[int] | Tensor | NDArray[Any]) -> None:
        self.values = np.unique(as_ids(ids).cpu().numpy().view(np.int64))
        if len(self.values) == 0:
            raise ValueError("there are no ids to be forgotten")
        self._by_text = {str(id).encode(): id for id in self}
        # Programs without signs write the same 64 bits so.
        self._by_text |= {str(id % 2**64).encode(): id for id in self if id < 0}

    def __iter__(self) -> Any:
        return iter(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)

    def among(self, numbers: NDArray[np.int64]) -> Match:
        """Returns how often each id is among numbers of any shape."""
        places = np.searchsorted(self.values, numbers).clip(max=len(self.values) - 1)
        return Counter(numbers[self.values[places] == numbers].tolist())

    def in_text(self, text: bytes) -> Match:
        """Returns how often each id is a number of a text that stands alone."""
        return Counter(self._by_text[number] for number in _NUMBER.findall(text) if number in self._by_text)

    def texts(self) -> list[str]:
        """Returns the decimal numbers that are ids."""
        return [text.decode() for text in self._by_text]

    def of_text(self, text: str) -> int:
        """Returns the id of one of `texts`."""
        return self._by_text[text.encode()]


def are_certain(found: Match) -> bool:
    """Whether what was found is ids: one of them at least has too many digits to be there by chance."""
    return any(abs(id) >= _FEWEST_DIGITS for id in found)


def read_ids(text: str, source: str) -> list[int]:
    """Returns the ids of a text.

    Args:
        text: decimal numbers.
        source: the origin of the text, for errors.

    Raises:
        ValueError: something else is in it.
    """
    words = [word for word in _BETWEEN.split(text) if word]
    if wrong := [word for word in words if not _ID.fullmatch(word)]:
        raise ValueError(f"{source}: ids are integers with commas or line ends between them, got {wrong[0]!r}")
    return [int(word) for word in words]


def read_ids_file(path: Path) -> list[int]:
    """Returns the ids of a file.

    Raises:
        ValueError: something else is in it.
        OSError: it cannot be read.
    """
    try:
        return read_ids(path.read_text(encoding="utf-8"), str(path))  # by path: the caller's own
    except UnicodeDecodeError:
        raise ValueError(f"{path}: ids are decimal numbers in a file of text") from None


__all__ = ["IdSet", "Match", "are_certain", "read_ids", "read_ids_file"]
