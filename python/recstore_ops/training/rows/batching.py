"""Streams of rows cut anew into batches, in order or shuffled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from recstore_ops.training.rows.batch import Batch, concatenate


def regroup(blocks: Iterable[Batch], num_rows: int) -> Iterator[Batch]:
    """Cuts a stream anew into batches of `num_rows` rows; the last one has what is left."""
    pending: list[Batch] = []
    pending_rows = 0
    for block in blocks:
        pending.append(block)
        pending_rows += len(block)
        if pending_rows < num_rows:
            continue
        joined = concatenate(pending)
        whole = pending_rows - pending_rows % num_rows
        for start in range(0, whole, num_rows):
            yield joined.rows(start, start + num_rows)
        pending, pending_rows = [joined.rows(whole, pending_rows)], pending_rows - whole
    if pending_rows > 0:
        yield concatenate(pending)


def shuffled(blocks: Iterable[Batch], window_rows: int, num_rows: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Permutes rows within consecutive windows of `window_rows`, the memory that this needs.

    Gives `num_rows` at a time: a whole permuted window would be fresh memory, which the system fills with zeros first.
    """
    for window in regroup(blocks, window_rows):
        for order in torch.from_numpy(rng.permutation(len(window))).split(num_rows):
            yield window.take(order)
