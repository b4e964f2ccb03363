"""Rows whose histories have ids in the id space of their targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recstore_ops.training.formats.field_ids import VALUE_BITS
from recstore_ops.training.rows.field_numbers import field_number
from recstore_ops.training.rows.row_source import MappedRows, RowSource


class SequenceRows(MappedRows):
    """The rows of a source, with the target's field in place of the history's in each id of a history.

    The ids of the source carry their field (`field_ids`). Then an item has one row of a table, as target and in every
    history.

    Args:
        source: before its ids are hashed.
        sequences: pairs of names of fields, a history and its target.

    Raises:
        ValueError: there is no such field.
    """

    def __init__(self, source: RowSource, sequences: Sequence[tuple[str, str]]) -> None:
        names = source.field_names
        self._sequences = [tuple(field_number("sequences", name, names) for name in pair) for pair in sequences]
        super().__init__(source, self._in_space_of_targets)

    def _in_space_of_targets(self, ids_N: Tensor) -> Tensor:
        fields_N = ids_N >> VALUE_BITS
        shifts_N = torch.zeros_like(ids_N)
        for history, target in self._sequences:
            shifts_N[fields_N == history] = (target - history) << VALUE_BITS
        return ids_N + shifts_N
