"""Puts the ids of fields together, row by row and field by field within a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The ids of one field and how many of them each row has, int64 [B]; None for one each.
FieldColumn = tuple[NDArray[np.int64], NDArray[np.int64] | None]


def interleave_fields(columns: Sequence[FieldColumn]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Returns the ids [N] of F fields and their offsets [B * F + 1], None where every field has one id."""
    if all(lengths is None for _, lengths in columns):
        return np.stack([ids for ids, _ in columns], axis=1).reshape(-1), None
    lengths_BF = np.stack([np.ones_like(ids) if lengths is None else lengths for ids, lengths in columns], axis=1)
    offsets = np.concatenate([np.zeros(1, np.int64), lengths_BF.reshape(-1).cumsum()])
    joined = np.empty(offsets[-1], dtype=np.int64)
    starts_BF = offsets[:-1].reshape(lengths_BF.shape)
    for field, (ids, _) in enumerate(columns):
        joined[_places(starts_BF[:, field], lengths_BF[:, field])] = ids
    return joined, offsets


def _places(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers from each start on, as many as its length."""
    shifts = starts - (lengths.cumsum() - lengths)
    return np.arange(lengths.sum()) + np.repeat(shifts, lengths)
