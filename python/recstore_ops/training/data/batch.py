"""Labelled rows of sparse features by field, and of dense features.

A row has F fields. A field is a bag of ids, with a value an id: one id in most formats, any number in others, none at
all too. All ids of a batch lie one after the other, row by row and field by field within a row; nothing is padded.
A format without fields has one, which holds all of a row's ids.

Shapes: B rows, F fields, N ids of all rows together, J dense features, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NO_GROUP = -(2**63)
"""The group of rows without one."""


@dataclass(frozen=True)
class Batch:
    """B labelled rows.

    Attributes:
        ids: int64 [N].
        labels: float32 [B], each 0 or 1; NaN in rows without labels.
        num_fields: F.
        offsets: int64 [B * F + 1]; field f of row b owns the ids from `offsets[b * F + f]` to before the next offset.
            None if every field has exactly one id, so that N = B * F.
        values: float32 [N]; None if every value is 1.
        dense: float32 [B, J]; None without dense features.
        weights: float32 [B], the weights of the rows' losses; None if all are 1.
        times: int64 [B], the times of the rows' events, in microseconds since 1970; None if unknown.
        groups: int64 [B], equal in rows of one group, `NO_GROUP` in rows of none; None if rows are not grouped.
    """

    ids: Tensor
    labels: Tensor
    num_fields: int = 1
    offsets: Tensor | None = None
    values: Tensor | None = None
    dense: Tensor | None = None
    weights: Tensor | None = None
    times: Tensor | None = None
    groups: Tensor | None = None

    def __len__(self) -> int:
        return self.labels.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        of_rows = (self.labels, self.dense, self.weights, self.times, self.groups)
        parts = (self.ids, self.offsets, self.values, *of_rows)
        return sum(part.nbytes for part in parts if part is not None)

    def offsets_or_ones(self) -> Tensor:
        """Returns `offsets`; creates them if every field has one id."""
        return (
            torch.arange(self.ids.numel() + 1, dtype=torch.int64, device=self.ids.device)
            if self.offsets is None
            else self.offsets
        )

    def values_or_ones(self) -> Tensor:
        """Returns `values`; creates them if all are 1."""
        return (
            torch.ones(self.ids.numel(), dtype=torch.float32, device=self.ids.device)
            if self.values is None
            else self.values
        )

    def rows(self, start: int, stop: int) -> Batch:
        """Returns the rows from `start` to before `stop`; features are views, not copies."""
        first, last = start * self.num_fields, stop * self.num_fields
        offsets = self.offsets
        if offsets is not None:
            offsets = offsets[first : last + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            offsets = offsets - first
        return Batch(
            ids=self.ids[first:last],
            labels=self.labels[start:stop],
            num_fields=self.num_fields,
            offsets=offsets,
            values=None if self.values is None else self.values[first:last],
            dense=None if self.dense is None else self.dense[start:stop],
            weights=None if self.weights is None else self.weights[start:stop],
            times=None if self.times is None else self.times[start:stop],
            groups=None if self.groups is None else self.groups[start:stop],
        )

    def take(self, order: Tensor) -> Batch:
        """Returns the rows whose numbers are in `order` (int64, any length), in that order."""
        return Batch(
            ids=self._taken(self.ids, order),
            labels=self.labels[order],
            num_fields=self.num_fields,
            offsets=self._taken_offsets(order),
            values=None if self.values is None else self._taken(self.values, order),
            dense=None if self.dense is None else self.dense.index_select(0, order),
            weights=None if self.weights is None else self.weights[order],
            times=None if self.times is None else self.times[order],
            groups=None if self.groups is None else self.groups[order],
        )

    def _taken(self, values_N: Tensor, order: Tensor) -> Tensor:
        if self.offsets is None:
            # With one id a field a row is one block: this takes one index a row, and `_positions` one for each id.
            return values_N.view(len(self), self.num_fields).index_select(0, order).view(-1)
        return values_N[self._positions(self.offsets, order)]

    def _taken_offsets(self, order: Tensor) -> Tensor | None:
        if self.offsets is None:
            return None
        return offsets_of_lengths(self.offsets.diff().view(-1, self.num_fields)[order].view(-1))

    def _positions(self, offsets: Tensor, order: Tensor) -> Tensor:
        """The places in `ids` of the ids of the rows in `order`."""
        starts = offsets[:: self.num_fields]
        lengths = starts.diff()[order]
        ends = lengths.cumsum(0)
        # All ids of a row move by the same distance, so that one number a row gives the place of every id.
        shift = starts[:-1][order] - (ends - lengths)
        place_N = torch.arange(int(lengths.sum()), dtype=torch.int64, device=lengths.device)
        return place_N + torch.repeat_interleave(shift, lengths)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Returns the rows of one or more batches, in order; all have equal fields and dense features, and all or none have
    weights, times and groups."""
    if len(batches) == 1:
        return batches[0]
    one_id_each = all(batch.offsets is None for batch in batches)
    all_ones = all(batch.values is None for batch in batches)
    dense = [batch.dense for batch in batches if batch.dense is not None]
    weights = [batch.weights for batch in batches if batch.weights is not None]
    times = [batch.times for batch in batches if batch.times is not None]
    groups = [batch.groups for batch in batches if batch.groups is not None]
    return Batch(
        ids=torch.cat([batch.ids for batch in batches]),
        labels=torch.cat([batch.labels for batch in batches]),
        num_fields=batches[0].num_fields,
        offsets=None
        if one_id_each
        else offsets_of_lengths(torch.cat([batch.offsets_or_ones().diff() for batch in batches])),
        values=None if all_ones else torch.cat([batch.values_or_ones() for batch in batches]),
        dense=torch.cat(dense) if dense else None,
        weights=torch.cat(weights) if weights else None,
        times=torch.cat(times) if times else None,
        groups=torch.cat(groups) if groups else None,
    )


def offsets_of_lengths(lengths: Tensor) -> Tensor:
    """Returns the offsets, int64 [B + 1], of bags with these `lengths`, int64 [B]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def weighted(rows_ND: Tensor, batch: Batch) -> Tensor:
    """Multiplies each id's row with its value: [N, D]."""
    return rows_ND if batch.values is None else rows_ND * batch.values[:, None]


def sum_by_field(features_ND: Tensor, batch: Batch) -> Tensor:
    """Sums the ids of each field, [N, D] -> [B, F, D], differentiable; an empty field gives zeros."""
    dim = features_ND.shape[1]
    if batch.offsets is not None:
        features_ND = torch.segment_reduce(features_ND, "sum", offsets=batch.offsets, axis=0)
    return features_ND.view(-1, batch.num_fields, dim)


def sum_by_row(features_ND: Tensor, batch: Batch) -> Tensor:
    """Sums all ids of each row, [N, D] -> [B, D], differentiable; an empty row gives zeros."""
    if batch.offsets is None:
        return sum_by_field(features_ND, batch).sum(1)
    # Every F-th offset begins a row, and the last of all is among them: there are B * F + 1.
    return torch.segment_reduce(features_ND, "sum", offsets=batch.offsets[:: batch.num_fields], axis=0)


def regroup(blocks: Iterable[Batch], num_rows: int) -> Iterator[Batch]:
    """Cuts a stream anew into batches of `num_rows` rows; the last one has what is left."""
    pending: list[Batch] = []
    pending_rows = 0
    for block in blocks:
        pending.append(block)
        pending_rows += len(block)
        # Joined only once there are enough: joining with each block would copy what waits again and again.
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


def field_number(option: str, name: str, field_names: Sequence[str]) -> int:
    """Returns the number of the field of that name, from 0.

    Args:
        option: what named the field, for the error.
        name: of the field.
        field_names: of the rows.

    Raises:
        ValueError: there is no such field.
    """
    if name not in field_names:
        raise ValueError(f"{option} must name a field, one of {', '.join(field_names)}; got {name!r}")
    return field_names.index(name)
