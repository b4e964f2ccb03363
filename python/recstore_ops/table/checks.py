"""Checks of what tables are given: ids, per-sample weights and types of rows."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recstore_ops.ops.integers import as_int, is_int64
from recstore_ops.sparse.transforms import refuse_symbolic

ROW_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The types of rows that are brought to a table: numbers that are values by themselves. Those of 8 bits are codes, and
without the scales that they lie beside they are other rows."""


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    A sum shows it for a fraction of what looking at each value takes. Finite values may add up to more than their type
    holds: only a finite sum says anything.
    """
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


_NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8)


def check_ids(ids: Tensor) -> Tensor:
    """Returns ids as the operators take them.

    Raises:
        TypeError: no dense tensor of int64, uint64, int32, int16, int8 or uint8.
    """
    if not isinstance(ids, Tensor):
        refuse_symbolic(ids)
        raise TypeError(f"ids must be a tensor, got {type(ids).__name__}")
    if ids.layout is not torch.strided or ids.is_nested:
        layout = f"one of layout {ids.layout}" if not ids.is_nested else "a nested one: give its values() and offsets()"
        raise TypeError(f"ids must be a dense tensor, got {layout}")
    if ids.dtype in _NARROW:
        return ids.to(torch.int64)
    if ids.dtype not in (torch.int64, torch.uint64):
        raise TypeError(f"ids must be int64, uint64, int32, int16, int8 or uint8, got {ids.dtype}")
    return ids


def as_ids(ids: Any) -> Tensor:
    """Returns ids as the operators take them: a tensor, or numbers as people write them.

    Args:
        ids: a tensor or an array of integers, an integer, or a list of integers, or of such lists of one length.

    Raises:
        TypeError: something else than integers; truth values are none.
        ValueError: an integer that is no int64, or lists of several lengths.
    """
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        ids = torch.from_numpy(ids.astype(np.uint64 if ids.dtype == np.uint64 else np.int64))
    refuse_symbolic(ids)
    if isinstance(ids, Tensor):
        return check_ids(ids)
    if isinstance(ids, list | tuple | range) and set(map(type, ids)) == {int}:
        with suppress(OverflowError):  # Which of them it is, is looked for below.
            return torch.from_numpy(np.array(ids, dtype=np.int64))
    try:
        return torch.from_numpy(np.array(_integers(ids), dtype=np.int64))
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise ValueError("ids in lists need lists of one length") from None


def _integers(ids: Any) -> Any:
    """The integers of a list, or of lists in it, or the one that it is."""
    if isinstance(ids, str | bytes):
        raise TypeError(f"ids must be integers, got the text {ids!r}")
    if isinstance(ids, Iterable) and not (isinstance(ids, Tensor | np.ndarray) and ids.ndim == 0):
        return [_integers(each) for each in ids]
    id = as_int("ids must be integers", ids)
    if not is_int64(id):
        raise ValueError(f"an id must be from {-(2**63)} to {2**63 - 1}, got {id}")
    return id


def check_weights(ids: Tensor, weights: Tensor | None, mode: str) -> None:
    """Checks `per_sample_weights` against the ids.

    Raises:
        ValueError: mode `max`, or another shape than the ids'.
        TypeError: weights that are not float32.
    """
    if weights is None:
        return
    refuse_symbolic(weights)
    if mode == "max":
        raise ValueError(f'per_sample_weights need mode "sum" or "mean", got mode {mode!r}')
    if weights.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights must have the shape of the ids, {tuple(ids.shape)}, got {tuple(weights.shape)}"
        )
    if weights.dtype != torch.float32:
        raise TypeError(f"per_sample_weights must be float32, got {weights.dtype}")


def refuse_text(argument: str, names: Any) -> None:
    """Refuses a text in the place of several names, which would be taken for its letters.

    Raises:
        TypeError: it is one, or one table.
    """
    if isinstance(names, str | bytes):
        raise TypeError(f"{argument} are names in a list, got the text {names!r}")
    if names is not None and not isinstance(names, Iterable):
        raise TypeError(f"{argument} are in a list, got {names!r}")
