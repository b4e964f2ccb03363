"""Rows of a table on their way to a file.

Shape suffixes: N ids, D dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from recstore_ops.config.progress_bars import Bar
from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.table.cut import TableCut, cut_tables, rows_at_a_time
from recstore_ops.table.known_shards import ELSEWHERE, refuse_sharded
from recstore_ops.table.refusals import refuse_shared_rows
from recstore_ops.table.table import Table
from recstore_ops.transfer.row_ranges import as_tensor, ranged_name
from recstore_ops.transfer.safetensors_file import Column
from recstore_ops.transfer.safetensors_index import Splittable


@contextmanager
def exports_of(tables: Iterable[Table], as_matrices: bool) -> Iterator[list[Export]]:
    """The rows of tables for an export, as they are at one moment, each table once.

    Args:
        tables: in the order of the file.
        as_matrices: whether all ids are exported, or those that have a row.

    Raises:
        ValueError: as a matrix, a table without `num_embeddings`; else one whose ids share rows.
        RuntimeError: a sharded table.
    """
    exported = list({table.name: table for table in tables}.values())
    for table in exported:
        _check(table, as_matrices)
    with cut_tables(exported) as cuts:
        yield [Export(cut, range(cut.table.config.num_embeddings or 0) if as_matrices else cut.ids) for cut in cuts]


def _check(table: Table, as_matrix: bool) -> None:
    refuse_sharded("an export of rows", [table.name], ELSEWHERE)
    if not as_matrix:
        refuse_shared_rows(table.name, table.config.admission, "a file of rows")
    elif table.config.num_embeddings is None:
        raise ValueError(f'table "{table.name}" has no num_embeddings, which as_matrices needs')


@dataclass(frozen=True)
class Export:
    """Rows of a table.

    Attributes:
        cut: the table at the moment of the export.
        ids: those of the rows, rising; a range for all ids of a table, with a row or without.
    """

    cut: TableCut
    ids: Tensor | range

    @property
    def table(self) -> Table:
        """The table."""
        return self.cut.table

    def __len__(self) -> int:
        return len(self.ids)

    def parts(self, bar: Bar, first: int = 0, end: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and float32 rows from place `first` on, some at a time; ids whose rows servers lost come no more."""
        ids, count = self.ids[first:end], rows_at_a_time(self.table)
        for start in range(0, len(ids), count):
            ids_N = as_tensor(ids[start : start + count])
            yield (ids_N, self.cut.values(ids_N)) if isinstance(ids, range) else self.cut.rows(ids_N)
            bar.update(ids_N.numel())

    def _all_parts(self, bar: Bar, first: int, end: int) -> Iterator[Tensor]:
        """The rows of all ids from place `first` on, in their own type, some at a time.

        Raises:
            RuntimeError: servers lost rows meanwhile.
        """
        missing = end - first
        for ids_N, rows_ND in self.parts(bar, first, end):
            yield rows_ND.to(VALUE_TYPES[self.table.config.dtype])
            missing -= ids_N.numel()
        if missing > 0:
            raise RuntimeError(
                f'table "{self.table.name}" lost {missing} rows on its servers while they were exported: export it '
                "while nothing deletes rows, or save a checkpoint, which has the rows of one moment"
            )

    def columns(self, bar: Bar, first: int, end: int) -> list[Column]:
        """The tensors of a safetensors file with the rows from place `first` on, in their own type."""
        dtype, rows = VALUE_TYPES[self.table.config.dtype], self._all_parts(bar, first, end)
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
