"""`inspect_table`: what a table of this process is and holds, to look at and to print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from recstore_ops.client.client import table_statistics
from recstore_ops.config.extras import imported
from recstore_ops.config.html_table import html_facts, html_table, shown
from recstore_ops.config.table_config import TableConfig
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.table.checks import as_ids
from recstore_ops.table.table import Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

_FLOAT_BYTES = 4
_SHOWN_VALUES = 6


@dataclass(frozen=True)
class RowNorms:
    """Euclidean norms of rows.

    Attributes:
        rows: the number of rows.
        minimum, mean, maximum: over those rows; NaN if a row holds NaN.
    """

    rows: int
    minimum: float
    mean: float
    maximum: float


@dataclass(frozen=True)
class InspectedRow:
    """The contents of a table for one id.

    Attributes:
        id: the id.
        is_stored: whether the id has a row; without one it reads as its initial value.
        values: the row, or the initial value, float32, `[dim]`.
        slots: the optimizer's slots by name, float32, `[dim]` or `[1]`; empty without a row.
    """

    id: int
    is_stored: bool
    values: Tensor
    slots: dict[str, Tensor]


@dataclass(frozen=True)
class TableReport:
    """The report of `inspect_table`.

    Attributes:
        name: the table's name.
        dim: elements a row.
        config: what the table was opened with.
        statistics: see `recstore_ops.table_statistics`.
        slots: the elements of each of the optimizer's slots in a row, by the slot's name.
        bytes_per_row: bytes of a row and its slots, without the id map and blocks that are not full.
        norms: of the table's rows, or of a sample of them; `None` for a table without rows.
        rows: the rows that were asked for, in that order.
    """

    name: str
    dim: int
    config: TableConfig
    statistics: dict[str, Any]
    slots: dict[str, int]
    bytes_per_row: int
    norms: RowNorms | None
    rows: list[InspectedRow]

    def print(self, console: Console | None = None) -> None:
        """Prints the report as plain tables.

        Args:
            console: the output; standard output by default.
        """
        if console is None:
            console = cast("Console", imported("rich.console", "cli", "a printed report").Console())
        console.print(self._overview())
        if self.rows:
            console.print(self._rows_grid())

    def _repr_html_(self) -> str:
        overview = html_facts(f'table "{self.name}"', self._facts())
        return (
            overview + html_table(("id", "stored", "values", *self.slots), self._row_cells()) if self.rows else overview
        )

    def _overview(self) -> Grid:
        from rich.markup import escape
        from rich.table import Table as Grid

        grid = Grid("", "", title=escape(f'table "{self.name}"'), title_justify="left", show_header=False, box=None)
        for name, value in self._facts().items():
            grid.add_row(name, escape(value))
        return grid

    def _facts(self) -> dict[str, str]:
        counts = {name.replace("_", " "): shown(value) for name, value in self.statistics.items()}
        options = {name.replace("_", " "): shown(value) for name, value in asdict(self.config).items()}
        slots = ", ".join(f"{name} [{width}]" for name, width in self.slots.items()) or "none"
        layout = {"dim": str(self.dim), "slots": slots, "bytes a row": f"{self.bytes_per_row:,}"}
        return {**layout, **options, **counts, "norms": _norms_line(self.norms)}

    def _rows_grid(self) -> Grid:
        from rich.table import Table as Grid

        grid = Grid("id", "stored", "values", *self.slots, box=None)
        for cells in self._row_cells():
            grid.add_row(*cells)
        return grid

    def _row_cells(self) -> Iterator[list[str]]:
        for row in self.rows:
            slots = [_vector(row.slots[name]) if row.is_stored else "-" for name in self.slots]
            yield [str(row.id), shown(row.is_stored), _vector(row.values), *slots]


def inspect_table(name: str, ids: Tensor | Iterable[int] | None = None, sample: int = 100_000) -> TableReport:
    """Describes a table and, if asked, the rows of some ids. It changes nothing.

    Args:
        name: the table's name.
        ids: int64: whose rows to show.
        sample: the norms are over this many rows at most, spread evenly over the table's rows by their age.

    Raises:
        KeyError: there is no such table.
        TypeError: ids that are no integers.
        IndexError: an id outside the table's `num_embeddings`.
        ValueError: a sample below 1, or an id that is no int64.
    """
    if sample < 1:
        raise ValueError(f"sample must be at least 1, got {sample}")
    asked, table = None if ids is None else as_ids(ids).reshape(-1), Table.open(name)
    slots = dict(store.table_slots(name) or [])
    return TableReport(
        name=name,
        dim=table.dim,
        config=table.config,
        statistics=table_statistics(name),
        slots=slots,
        bytes_per_row=_FLOAT_BYTES * (table.dim + sum(slots.values())),
        norms=_row_norms(table, sample),
        rows=[] if asked is None else _inspect_rows(table, list(slots), asked),
    )


def _row_norms(table: Table, sample: int) -> RowNorms | None:
    ids = operators.hashtable_ids(table.handle)
    if ids.numel() == 0:
        return None
    stride = -(-ids.numel() // sample)
    rows = operators.emb_read(table.handle, ids[::stride], table.dim)
    norms = torch.linalg.vector_norm(rows, dim=1)
    return RowNorms(norms.numel(), norms.min().item(), norms.mean().item(), norms.max().item())


def _inspect_rows(table: Table, slots: list[str], ids: Tensor) -> list[InspectedRow]:
    index, rows = operators.hashtable_lookup(table.handle, ids, table.dim, False)
    values = {name: operators.hashtable_slot(table.handle, ids, name) for name in slots}
    return [
        InspectedRow(
            id=number,
            is_stored=place >= 0,
            values=rows[position],
            slots={name: values[name][position] for name in slots} if place >= 0 else {},
        )
        for position, (number, place) in enumerate(zip(ids.tolist(), index.tolist(), strict=True))
    ]


def _norms_line(norms: RowNorms | None) -> str:
    if norms is None:
        return "no rows"
    return f"min {norms.minimum:.4g}, mean {norms.mean:.4g}, max {norms.maximum:.4g} of {norms.rows:,} rows"


def _vector(values: Tensor) -> str:
    shown = " ".join(f"{value:.4g}" for value in values[:_SHOWN_VALUES].tolist())
    return f"{shown} ..." if values.numel() > _SHOWN_VALUES else shown
