"""Rows of sparse features in compressed sparse row (CSR) form.

A row is a label and any number of (id, value) features. All features of a batch lie one after the
other; `offsets` says where each row begins. Nothing is padded, and a row may be empty.

Shapes: B rows, N features of all rows together, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B labelled rows.

    Attributes:
        ids: int64 [N], the feature ids.
        values: float32 [N], the feature values.
        offsets: int64 [B + 1]; row b owns the features `offsets[b]` to `offsets[b + 1]`.
        labels: float32 [B], each 0 or 1.
    """

    ids: Tensor
    values: Tensor
    offsets: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the four tensors."""
        return self.ids.nbytes + self.values.nbytes + self.offsets.nbytes + self.labels.nbytes

    def rows(self, start: int, stop: int) -> Batch:
        """Returns the rows from `start` to before `stop`; features are views, not copies."""
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return Batch(self.ids[first:last], self.values[first:last], offsets - first, self.labels[start:stop])

    def take(self, order: Tensor) -> Batch:
        """Returns the rows whose numbers are in `order` (int64, any length), in that order."""
        lengths = self.offsets.diff()[order]
        offsets = offsets_of_lengths(lengths)
        shift = self.offsets[order] - offsets[:-1]
        positions = torch.arange(int(offsets[-1])) + torch.repeat_interleave(shift, lengths)
        return Batch(self.ids[positions], self.values[positions], offsets, self.labels[order])


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Returns the rows of one or more batches, in order."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        torch.cat([batch.ids for batch in batches]),
        torch.cat([batch.values for batch in batches]),
        offsets_of_lengths(torch.cat([batch.offsets.diff() for batch in batches])),
        torch.cat([batch.labels for batch in batches]),
    )


def offsets_of_lengths(lengths: Tensor) -> Tensor:
    """Returns the offsets, int64 [B + 1], of rows with these `lengths`, int64 [B]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def sum_by_row(features_ND: Tensor, offsets: Tensor) -> Tensor:
    """Sums each row's features; an empty row sums to zero.

    Args:
        features_ND: [N, D], one line per feature.
        offsets: int64 [B + 1].
    Returns:
        [B, D], differentiable.
    """
    return torch.segment_reduce(features_ND, "sum", offsets=offsets, axis=0)
