"""The rows of tables as they are at one moment, while other threads go on.

Shape suffixes: N ids, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recstore_ops import _native
from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.ops import operators
from recstore_ops.table.table import Table

_BYTES_PER_CHUNK = 16 << 20


def rows_at_a_time(table: Table) -> int:
    """How many rows of a table are moved at a time."""
    return max(1, _BYTES_PER_CHUNK // (4 * table.dim))


class TableCut:
    """The rows that a table has at one moment.

    If the table lies on servers, they are read as they are when they are asked for, without those that went meanwhile.

    Attributes:
        table: the table.
        ids: the ids that have a row, int64 `[N]`, rising.
    """

    def __init__(self, table: Table, cut: _native.TableCut | None) -> None:
        self.table = table
        self._cut = cut
        if cut is None:
            self.ids = operators.hashtable_ids(table.handle).sort().values
        else:
            self.ids = _numbers(cut.ids(), torch.int64)

    def rows(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """Those of some ids that have a row, and their rows, float32 `[N, D]`."""
        if self._cut is not None:
            return ids_N, self.values(ids_N)
        index_N, rows_ND = operators.hashtable_lookup(self.table.handle, ids_N, self.table.dim, False)
        is_there_N = index_N >= 0
        return (ids_N, rows_ND) if bool(is_there_N.all()) else (ids_N[is_there_N], rows_ND[is_there_N])

    def values(self, ids_N: Tensor) -> Tensor:
        """The rows that a lookup of ids gives, float32 `[N, D]`: an id without a row has its initial value."""
        if self._cut is None:
            return operators.emb_read(self.table.handle, ids_N, self.table.dim)
        return _numbers(self._cut.rows_of(_bytes_of(ids_N)), torch.float32).reshape(-1, self.table.dim)

    def all_rows(self) -> tuple[Tensor, Tensor]:
        """All ids that have a row, and their rows in the table's type, `[N, D]`."""
        shape, count, done = (len(self.ids), self.table.dim), rows_at_a_time(self.table), 0
        rows_ND = torch.empty(shape, dtype=VALUE_TYPES[self.table.config.dtype], device="cpu")
        parts = []
        for start in range(0, len(self.ids), count):
            ids_N, part_ND = self.rows(self.ids[start : start + count])
            rows_ND[done : done + len(ids_N)] = part_ND
            parts.append(ids_N)
            done += len(ids_N)
        return (self.ids, rows_ND) if done == len(self.ids) else (torch.cat(parts), rows_ND[:done])

    def slot(self, name: str, ids_N: Tensor) -> Tensor:
        """The values of a slot of the optimizer for ids, float32 `[N, width]`; zeros for an id without a row.

        Raises:
            RuntimeError: there is no such slot.
        """
        values = None if self._cut is None else self._cut.slot_of(name, _bytes_of(ids_N))
        if not values:
            return operators.hashtable_slot(self.table.handle, ids_N, name)
        return _numbers(values, torch.float32).reshape(len(ids_N), -1)

    def progress(self) -> dict[str, Any]:
        """The table's step and learning rate, and what else its statistics say of the next step."""
        return self.table.statistics() if self._cut is None else self._cut.progress()


@contextmanager
def cut_tables(tables: Sequence[Table]) -> Iterator[list[TableCut]]:
    """Within it the rows of tables can be read as they were when it was entered, those of all at one moment.

    Other threads go on. As long as it lasts, a copy is kept of each row that they change.

    Args:
        tables: those of this process are cut together; a table comes once.

    Raises:
        RuntimeError: a table was dropped, or is given twice; later, a checkpoint was loaded into one.
    """
    try:
        cuts = _native.cut_tables([table.table_id for table in tables])
    except RuntimeError:
        for table in tables:
            table.statistics()  # Says by its name which of them was dropped.
        raise
    try:
        yield [TableCut(table, cut) for table, cut in zip(tables, cuts, strict=True)]
    finally:
        for cut in cuts:
            if cut is not None:
                cut.close()


def _bytes_of(ids_N: Tensor) -> bytes:
    return ids_N.contiguous().numpy().tobytes()


def _numbers(given: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(given, dtype=dtype) if given else torch.empty(0, dtype=dtype, device="cpu")
