"""Rows of a table on their way to a file.

Shape suffixes: N ids, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from recstore_ops.config.progress_bars import Bar
from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.ops import operators
from recstore_ops.table.known_shards import ELSEWHERE, refuse_sharded
from recstore_ops.table.refusals import refuse_shared_rows
from recstore_ops.table.table import Table
from recstore_ops.transfer.row_ranges import as_tensor, ranged_name, rows_at_a_time
from recstore_ops.transfer.safetensors_file import Column
from recstore_ops.transfer.safetensors_index import Splittable


def exported_ids(table: Table, as_matrix: bool) -> Tensor | range:
    """The ids that a table is exported with: those that have a row, rising, or all.

    Raises:
        ValueError: as a matrix, a table without `num_embeddings`; else one whose ids share rows.
        RuntimeError: a sharded table.
    """
    refuse_sharded("an export of rows", [table.name], ELSEWHERE)
    if not as_matrix:
        refuse_shared_rows(table.name, table.config.admission, "a file of rows")
        return operators.hashtable_ids(table.handle).sort().values
    if table.config.num_embeddings is None:
        raise ValueError(f'table "{table.name}" has no num_embeddings, which as_matrices needs')
    return range(table.config.num_embeddings)


@dataclass(frozen=True)
class Export:
    """Rows of a table.

    Attributes:
        ids: those of the rows, rising; a range for all ids of a table, with a row or without.
    """

    table: Table
    ids: Tensor | range

    def __len__(self) -> int:
        return len(self.ids)

    def parts(self, bar: Bar, first: int = 0, end: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and float32 rows from place `first` on, some at a time."""
        ids, count = self.ids[first:end], rows_at_a_time(self.table)
        for start in range(0, len(ids), count):
            ids_N = as_tensor(ids[start : start + count])
            yield ids_N, operators.emb_read(self.table.handle, ids_N, self.table.dim)
            bar.update(ids_N.numel())

    def columns(self, bar: Bar, first: int, end: int) -> list[Column]:
        """The tensors of a safetensors file with the rows from place `first` on, in their own type."""
        dtype = VALUE_TYPES[self.table.config.dtype]
        rows = (rows_ND.to(dtype) for _, rows_ND in self.parts(bar, first, end))
        shape = (end - first, self.table.dim)
        if isinstance(self.ids, range):
            return [Column(self._name("weight", first, end), dtype, shape, rows)]
        ids = Column.of(self._name("ids", first, end), self.ids[first:end])
        return [ids, Column(self._name("rows", first, end), dtype, shape, rows)]

    def _name(self, what: str, first: int, end: int) -> str:
        name = f"{self.table.name}.{what}"
        return name if (first, end) == (0, len(self)) else ranged_name(name, first, end)

    def splittable(self, bar: Bar) -> Splittable:
        """The table's tensors, which may be split over several files."""
        return Splittable(self.table.name, len(self), partial(self.columns, bar))
