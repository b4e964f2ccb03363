"""Checks of what lookups are given: ids and per-sample weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from recstore_ops.sparse.transforms import refuse_symbolic


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
