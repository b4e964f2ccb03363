"""Text of columns between separators, the form of most public click logs.

Arrow splits and converts a block of lines; what it lets pass beyond the grammar of the columns, such as `0x1f`, spaces
or quotes, has characters that no column has, so that one look at a block's characters refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from recstore_ops.training.formats.cell_reader import CellReader
from recstore_ops.training.formats.columns import (
    FIELD_KINDS,
    LABEL_KINDS,
    Column,
    ColumnKind,
    check_timestamps,
    dense_of,
    hex_values_of,
    labels_of,
    values_of,
)
from recstore_ops.training.formats.field_ids import field_ids
from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.row_format import quote

_SPACES_ONLY = re.compile(rb"^ +$", re.MULTILINE)


class DelimitedFormat:
    """Rows of columns.

    Args:
        name: of the format.
        columns: in order; one is a label, unless rows have none. The id of a field's cell carries the field
            (`field_ids`).
        separator: one character, or two colons.
        characters: all that cells may have.
        has_header: whether files may begin with a line of the columns' names.
        threshold: the least rating that counts as 1.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[Column],
        *,
        separator: bytes,
        characters: bytes,
        has_header: bool = False,
        threshold: float = 0.0,
    ) -> None:
        self.name = name
        self.group_name: str | None = None
        self.field_names = tuple(column.name for column in columns if column.kind in FIELD_KINDS)
        self.dense_names = tuple(column.name for column in columns if column.kind is ColumnKind.COUNT)
        self.has_labels = any(column.kind in LABEL_KINDS for column in columns)
        self._columns = tuple(columns)
        self._cells = CellReader(columns, separator)
        self._separator = separator
        self._characters = characters + separator + b"\n"
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
        if b" " in block:
            block = _SPACES_ONLY.sub(b"", block)
        if block.translate(None, self._characters):
            raise ValueError("a character is in no cell")
        columns = self._cells.read(block)
        counts = self._of_kind(columns, ColumnKind.COUNT)
        return Batch(
            ids=torch.from_numpy(self._ids(columns)),
            labels=torch.from_numpy(self._labels(columns)),
            num_fields=len(self.field_names),
            dense=torch.from_numpy(dense_of(counts)) if counts else None,
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

    def _of_kind(self, columns: dict[str, pa.Array], *kinds: ColumnKind) -> list[pa.Array]:
        return [columns[column.name] for column in self._columns if column.kind in kinds]

    def _labels(self, columns: dict[str, pa.Array]) -> NDArray[np.float32]:
        for cells in self._of_kind(columns, ColumnKind.TIMESTAMP):
            check_timestamps(cells)
        label = next((column for column in self._columns if column.kind in LABEL_KINDS), None)
        if label is None:
            return np.full(len(next(iter(columns.values()))), np.nan, dtype=np.float32)
        return labels_of(columns[label.name], label.kind, self._threshold)

    def _ids(self, columns: dict[str, pa.Array]) -> NDArray[np.int64]:
        """The ids, field by field within a row, [B * F]."""
        fields = [column for column in self._columns if column.kind in FIELD_KINDS]
        values_BF = np.empty((len(columns[fields[0].name]), len(fields)), dtype=np.int64)
        hex_fields = [field for field, column in enumerate(fields) if column.kind is ColumnKind.HEX]
        if hex_fields:
            values_BF[:, hex_fields] = hex_values_of(self._of_kind(columns, ColumnKind.HEX)).T
        for field, column in enumerate(fields):
            if column.kind is not ColumnKind.HEX:
                values_BF[:, field] = values_of(columns[column.name], column.kind)
        return field_ids(values_BF).reshape(-1)
