"""A stand-in for a device: its copies happen when something waits for them, and no sooner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Event(NamedTuple):
    """A copy that has not happened yet."""

    target: Tensor
    source: Tensor


class SlowCopies:
    """Copies between the host and a device that is the host too. What has not arrived is NaN.

    Args:
        waits: whether the device waits; where it does not, it computes with what has not arrived.

    Attributes:
        log: what was done, in order.
    """

    def __init__(self, waits: bool = True) -> None:
        self.log: list[str] = []
        self._waits = waits

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), torch.nan, dtype=dtype)

    def to_device(self, pinned: Tensor) -> tuple[Tensor, Event]:
        self.log.append("to device")
        return self._begin(pinned)

    def to_host(self, computed: Tensor) -> tuple[Tensor, Event]:
        self.log.append("to host")
        return self._begin(computed)

    def _begin(self, source: Tensor) -> tuple[Tensor, Event]:
        target = self.pinned(source.shape, source.dtype)
        return target, Event(target, source)

    def wait(self, arriving: Tensor, event: Event) -> None:
        assert arriving is event.target
        self.log.append("wait")
        if self._waits:
            _happen(event)

    def synchronize(self, event: Event) -> None:
        self.log.append("synchronize")
        _happen(event)


def _happen(event: Event) -> None:
    event.target.data.copy_(event.source.data)  # As a device does it: torch counts no change.
