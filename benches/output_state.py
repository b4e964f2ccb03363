"""Puts the memory that an output is going to be written to into a known state.

Whether it is still in the caches is worth a third of a lookup's time, so it is the same for all competitors: each
takes its output from torch's allocator, which hands out the memory that was prepared and freed here; see
`benches.tensor_memory`.
"""

from __future__ import annotations

import functools

import torch

from benches.measured import OutputState
from benches.yardstick import flush

_MORE_THAN_CACHES = 256 * 2**20


def put_into(state: OutputState, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Prepares the memory of the next output of that shape: `hot` just written, `cold` in no cache."""
    if state == "as it is":
        return
    memory = torch.empty(shape, dtype=dtype)
    memory.zero_()  # Its pages are there in either state.
    if state == "cold" and not flush(memory):
        _eviction().add_(1)


@functools.cache
def _eviction() -> torch.Tensor:
    return torch.zeros(_MORE_THAN_CACHES, dtype=torch.uint8)
