"""The format libffm: `label field:id:value field:id:value ...`."""

from __future__ import annotations

import numpy as np
import torch

from recstore_ops.training.formats.sparse_lines import SparseLines, explain_sparse_line, parse_sparse_lines
from recstore_ops.training.rows.batch import Batch, offsets_of_lengths
from recstore_ops.training.rows.row_format import quote
from recstore_ops.training.rows.row_source import numbered_names


class LibffmFormat:
    """Rows with any number of features in each field.

    Args:
        num_fields: fields are 0 to before this; None takes all features as one field, whatever theirs is.
        reason: why there are that many, for messages.
    """

    name = "libffm"
    dense_names: tuple[str, ...] = ()
    has_labels = True
    group_name: str | None = None

    def __init__(self, num_fields: int | None = None, *, reason: str = "as num_fields says") -> None:
        self._num_fields = num_fields
        self._reason = reason
        self.field_names = ("features",) if num_fields is None else numbered_names("field", num_fields)

    def is_header(self, line: bytes) -> bool:
        return False

    def parse(self, block: bytes) -> Batch:
        lines = parse_sparse_lines(block, parts=3)
        return _one_field(lines) if self._num_fields is None else _by_field(lines, self._num_fields)

    def explain(self, line: bytes) -> str:
        try:
            lines = parse_sparse_lines(line, parts=3)
        except ValueError:
            return explain_sparse_line(line, "field:id:value (libffm)", lambda part: parse_sparse_lines(part, parts=3))
        first = np.flatnonzero(_outside(lines.integers[0], self._num_fields or 0))[0]
        wrong = line.split()[1 + first]
        return f"expected a field from 0 to before {self._num_fields}, {self._reason}, got {quote(wrong)}"


def _one_field(lines: SparseLines) -> Batch:
    values = lines.values_unless_ones
    return Batch(
        ids=torch.from_numpy(lines.integers[1]),
        labels=torch.from_numpy(lines.labels),
        offsets=offsets_of_lengths(torch.from_numpy(lines.lengths)),
        values=None if values is None else torch.from_numpy(values),
    )


def _by_field(lines: SparseLines, num_fields: int) -> Batch:
    fields, ids = lines.integers
    if _outside(fields, num_fields).any():
        raise ValueError("a field is out of range")
    num_rows = len(lines.labels)
    bags = np.repeat(np.arange(num_rows), lines.lengths) * num_fields + fields
    order = np.argsort(bags, kind="stable")
    lengths = np.bincount(bags, minlength=num_rows * num_fields)
    values = lines.values_unless_ones
    return Batch(
        ids=torch.from_numpy(ids[order]),
        labels=torch.from_numpy(lines.labels),
        num_fields=num_fields,
        offsets=None if (lengths == 1).all() else offsets_of_lengths(torch.from_numpy(lengths)),
        values=None if values is None else torch.from_numpy(values[order]),
    )


def _outside(fields: np.ndarray, num_fields: int) -> np.ndarray:
    return (fields < 0) | (fields >= num_fields)
