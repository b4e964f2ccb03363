"""Copies between the host and a device, beside what the device computes.

`Copies` is the interface that staging uses for a device; `CudaCopies` implements it for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Copies on a stream of their own."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies take without waiting. It is used again once nothing holds it."""
        ...

    def to_device(self, pinned: Tensor) -> tuple[Tensor, Any]:
        """Begins a copy to the device; returns the copy and the event that comes with it."""
        ...

    def to_host(self, computed: Tensor) -> tuple[Tensor, Any]:
        """Begins a copy to pinned memory, after what is computed so far; returns the copy and its event."""
        ...

    def wait(self, arriving: Tensor, event: Any) -> None:
        """Makes what is computed from now on wait for a tensor of `to_device`; the caller does not."""
        ...

    def synchronize(self, event: Any) -> None:
        """Waits for an event."""
        ...


class CudaCopies:
    """Copies on a CUDA stream of their own.

    Torch keeps pinned memory that was let go for the next request, and waits there for copies that still use it.

    Args:
        device: a CUDA device.

    Raises:
        ValueError: another device.
        RuntimeError: there is no CUDA here.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(
                f"rows are staged for a CUDA device, got {self.device}; on the CPU lookups read them where they lie"
            )
        if not torch.cuda.is_available():
            raise RuntimeError(f"rows are staged for {self.device}, but torch has no CUDA here")
        self._stream = torch.cuda.Stream(self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def to_device(self, pinned: Tensor) -> tuple[Tensor, torch.Event]:
        # The memory is this stream's, so that the copy need not wait for what is computed.
        with torch.cuda.stream(self._stream):
            copied = pinned.to(self.device, non_blocking=True)
            return copied, self._stream.record_event()

    def to_host(self, computed: Tensor) -> tuple[Tensor, torch.Event]:
        pinned = self.pinned(computed.shape, computed.dtype)
        # The gradients are computed on the current stream, and must be there before the copy begins.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(computed, non_blocking=True)
            # Without it the allocator may give this memory to the computing stream while the copy still reads it.
            computed.record_stream(self._stream)
            return pinned, self._stream.record_event()

    def wait(self, arriving: Tensor, event: torch.Event) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        # The memory belongs to the copying stream, which must not reuse it before the computation has read it.
        arriving.record_stream(current)

    def synchronize(self, event: torch.Event) -> None:
        event.synchronize()
