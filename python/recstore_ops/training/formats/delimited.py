"""Text of columns between separators, the form of most public click logs.

The native module parses a block of lines into the arrays of a batch, and refuses it as a whole where a line is bad.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recstore_ops import _native
from recstore_ops.training.formats.columns import FIELD_KINDS, LABEL_KINDS, Column, ColumnKind
from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.row_format import quote


class DelimitedFormat:
    """Rows of columns.

    Args:
        name: of the format.
        columns: in order; one is a label, unless rows have none. The id of a field's cell carries the field
            (`field_ids`).
        separator: one character, or two colons.
        has_header: whether files may begin with a line of the columns' names.
        threshold: the least rating that counts as 1.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[Column],
        *,
        separator: bytes,
        has_header: bool = False,
        threshold: float = 0.0,
    ) -> None:
        self.name = name
        self.group_name: str | None = None
        self.field_names = tuple(column.name for column in columns if column.kind in FIELD_KINDS)
        self.dense_names = tuple(column.name for column in columns if column.kind is ColumnKind.COUNT)
        self.has_labels = any(column.kind in LABEL_KINDS for column in columns)
        self._columns = tuple(columns)
        self._kinds = [column.kind.name.lower() for column in columns]
        self._separator = separator
        self._has_header = has_header
        self._threshold = threshold

    def is_header(self, line: bytes) -> bool:
        titles = [(column.title or column.name).encode() for column in self._columns]
        found = line.split(self._separator)
        # A value may look like one name, C1 for example.
        if not self._has_header or len(set(found) & set(titles)) < 2:
            return False
        if found != titles:
            expected = self._separator.join(titles).decode()
            raise ValueError(f"expected the header {expected} ({self.name}), got {quote(line)}")
        return True

    def parse(self, block: bytes) -> Batch:
        num_rows, ids, labels, dense = _native.parse_delimited(block, self._kinds, self._separator, self._threshold)
        num_fields, num_dense = len(self.field_names), len(self.dense_names)
        return Batch(
            ids=_tensor(ids, torch.int64, num_rows * num_fields),
            labels=_tensor(labels, torch.float32, num_rows),
            num_fields=num_fields,
            dense=_tensor(dense, torch.float32, num_rows * num_dense).view(num_rows, num_dense) if num_dense else None,
        )

    def explain(self, line: bytes) -> str:
        cells = line.split(self._separator)
        if len(cells) != len(self._columns):
            separator = self._separator.decode()
            return f"expected {len(self._columns)} columns ({self.name}) between {separator!r}, got {len(cells)}"
        place = next((place for place in range(len(cells)) if self._fails(self._with_samples(cells, place))), 0)
        column = self._columns[place]
        return f"expected {column.kind.expected} as {column.name} ({self.name}), got {quote(cells[place])}"

    def _with_samples(self, cells: Sequence[bytes], place: int) -> bytes:
        """The line of good cells, apart from that at `place`."""
        samples = [column.kind.sample for column in self._columns]
        return self._separator.join([*samples[:place], cells[place], *samples[place + 1 :]])

    def _fails(self, line: bytes) -> bool:
        try:
            self.parse(line + b"\n")
        except ValueError:
            return True
        return False


def _tensor(numbers: bytearray, dtype: torch.dtype, count: int) -> Tensor:
    """The first `count` numbers, without a copy."""
    # An empty buffer has no address that a tensor could have.
    return torch.frombuffer(numbers, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype, device="cpu")
