"""Segments of numbers: parts with equally many rows, as far as equal numbers allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from recstore_ops.training.quality.evaluation import Scores
from recstore_ops.training.rows.number_keys import numbers_of_keys

NUMBER_PARTS = 10


def in_number_parts(scores: Scores) -> Scores:
    """Returns scores whose segments are keys of numbers with up to `NUMBER_PARTS` parts as segments, from 0 on.

    Equal numbers are in one part, so that there may be fewer. The texts are the parts' bounds.

    Raises:
        ValueError: the scores have no segments.
    """
    if scores.segments is None or scores.in_segment is None:
        raise ValueError("these scores have no segments: there is nothing to cut into parts")
    inside = scores.in_segment.numpy()
    numbers = numbers_of_keys(scores.segments.numpy()[inside])
    segments = np.zeros(len(inside), dtype=np.int64)
    if numbers.size == 0:
        return replace(scores, segments=torch.from_numpy(segments), texts=None)
    in_order = np.sort(numbers)
    starts = np.unique(in_order[np.arange(NUMBER_PARTS) * numbers.size // NUMBER_PARTS])
    segments[inside] = np.searchsorted(starts, numbers, side="right") - 1
    ends = [f"{end:g})" for end in starts[1:]] + [f"{in_order[-1]:g}]"]
    texts = {part: f"[{start:g}, {end}" for part, (start, end) in enumerate(zip(starts, ends, strict=True))}
    return replace(scores, segments=torch.from_numpy(segments), texts=texts)
