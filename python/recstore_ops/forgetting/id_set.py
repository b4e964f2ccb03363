"""The ids that are looked for, in the forms in which files have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Found = Counter[int]
"""How often each id was found."""

_ID_BYTES = 8
_BYTES_AT_A_TIME = 1 << 20
_LEAST, _MOST = -(2**63), 2**63 - 1
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
        self.values = np.unique(np.array([_checked(id) for id in _listed(ids)], np.int64))
        if len(self.values) == 0:
            raise ValueError("there are no ids to be forgotten")
        self._by_text = {str(id).encode(): id for id in self}
        # Programs without signs write the same 64 bits so.
        self._by_text |= {str(id % 2**64).encode(): id for id in self if id < 0}
        self._ends = np.zeros(1 << 16, bool)
        self._ends[self.values & 0xFFFF] = True

    def __iter__(self) -> Any:
        return iter(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)

    def among(self, numbers: NDArray[np.int64]) -> Found:
        """Returns how often each id is among numbers of any shape."""
        places = np.searchsorted(self.values, numbers).clip(max=len(self.values) - 1)
        return Counter(numbers[self.values[places] == numbers].tolist())

    def among_texts(self, texts: Iterable[bytes]) -> Found:
        """Returns how often each id is among decimal numbers."""
        return Counter(self._by_text[text] for text in texts if text in self._by_text)

    def texts(self) -> list[str]:
        """Returns the decimal numbers that are ids."""
        return [text.decode() for text in self._by_text]

    def of_text(self, text: str) -> int:
        """Returns the id of one of `texts`."""
        return self._by_text[text.encode()]

    def within(self, file: BinaryIO) -> Found:
        """Returns how often each id is in a file of this package, as eight bytes, wherever they begin."""
        found, rest = Found(), b""
        while part := file.read(_BYTES_AT_A_TIME):
            found += self._within(rest + part)
            rest = (rest + part)[-(_ID_BYTES - 1) :]
        return found

    def _within(self, data: bytes) -> Found:
        octets = np.frombuffer(data, np.uint8)
        if len(octets) < _ID_BYTES:
            return Counter()
        ends = octets[:-7] | octets[1:-6].astype(np.uint16) << 8
        begins = np.flatnonzero(self._ends[ends])
        windows = np.lib.stride_tricks.sliding_window_view(octets, _ID_BYTES)[begins]
        return self.among(np.ascontiguousarray(windows).view("<i8").ravel())


def are_certain(found: Found) -> bool:
    """Whether what was found is ids: one of them at least has too many digits to be there by chance."""
    return any(abs(id) >= _FEWEST_DIGITS for id in found)


def _listed(ids: Any) -> list[Any]:
    if isinstance(ids, str | bytes):
        raise TypeError(f"ids must be integers, got the text {ids!r}")
    if isinstance(ids, Tensor | np.ndarray):
        if ids.dtype.is_floating_point if isinstance(ids, Tensor) else ids.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        return ids.reshape(-1).tolist()
    return list(ids)


def _checked(id: Any) -> int:
    if isinstance(id, bool) or not isinstance(id, int | np.integer):
        raise TypeError(f"ids must be integers, got {id!r}")
    if not _LEAST <= id <= _MOST:
        raise ValueError(f"an id must be from {_LEAST} to {_MOST}, got {id}")
    return int(id)


__all__ = ["Found", "IdSet", "are_certain"]
