"""The command `recstore inspect`: prints what `inspect_checkpoint` finds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid
from torch import Tensor

from recstore_ops.config.command_options import read_user_path
from recstore_ops.inspect.checkpoint_report import (
    CheckpointReport,
    SavedTableReport,
    SnapshotReport,
    inspect_checkpoint,
)
from recstore_ops.inspect.table_report import InspectedRow, RowNorms, TableReport

_WIDE = 1000
"""Columns of an output that is no terminal: enough for every line to stay one line."""


def inspect_command(
    path: Annotated[Path, typer.Argument(help="The directory of a checkpoint.", parser=read_user_path)],
    table: Annotated[str | None, typer.Option(help="Show this table only, with its configuration.")] = None,
    ids: Annotated[
        str | None, typer.Option(help="Show the rows of these ids: 3,-7. Needs --table if there are several.")
    ] = None,
    slots: Annotated[bool, typer.Option("--slots", help="Show the optimizer's slots of those rows too.")] = False,
    form: Annotated[
        Literal["text", "json"],
        typer.Option("--format", help="json is for scripts; nan, inf and -inf are strings there."),
    ] = "text",
) -> None:
    """Show what a checkpoint holds: its snapshots, and the tables of the newest, all files checked.

    The tables are loaded, so that it takes the memory that they take in training.
    """
    if slots and ids is None:
        raise ValueError("--slots shows the slots of the rows of --ids, which are missing")
    try:
        report = inspect_checkpoint(path, table, None if ids is None else _parsed(ids))
    except (RuntimeError, IndexError) as error:
        raise ValueError(str(error)) from None
    if form == "json":
        print(json.dumps(_as_json(report, slots), indent=2, allow_nan=False))
    else:
        _print(report, table is not None, slots)


def _parsed(ids: str) -> list[int]:
    try:
        numbers = [int(number) for number in ids.split(",")]
    except ValueError:
        raise ValueError(f'--ids takes ids separated by commas, as in "3,-7", got "{ids}"') from None
    for number in numbers:
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"--ids takes int64 ids, got {number}")
    return numbers


def _as_json(report: CheckpointReport, slots: bool) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "snapshots": [{**asdict(snapshot), "created": snapshot.created.isoformat()} for snapshot in report.snapshots],
        "tables": [_table_as_json(saved, slots) for saved in report.tables.values()],
        **({} if report.left_out is None else {"left_out": report.left_out}),
    }


def _table_as_json(saved: SavedTableReport, slots: bool) -> dict[str, Any]:
    table = saved.table
    return {
        "name": table.name,
        "dim": table.dim,
        "config": asdict(table.config),
        "bytes": saved.bytes,
        "slots": table.slots,
        "statistics": table.statistics,
        "norms": None if table.norms is None else asdict(table.norms),
        "non_finite": saved.non_finite,
        "rows": [_row_as_json(row, slots) for row in table.rows],
    }


def _row_as_json(row: InspectedRow, slots: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"id": row.id, "is_stored": row.is_stored, "values": _numbers(row.values)}
    if slots:
        found["slots"] = {name: _numbers(values) for name, values in row.slots.items()}
    return found


def _numbers(values: Tensor) -> list[float | str]:
    """JSON has no NaN and no infinity."""
    return [value if math.isfinite(value) else str(value) for value in values.tolist()]


def _print(report: CheckpointReport, in_full: bool, slots: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    if report.snapshots:
        console.print(_snapshots_grid(report))
        if (metadata := report.snapshots[-1].metadata) is not None:
            console.print(f"metadata: {json.dumps(metadata)}", markup=False, highlight=False)
    else:
        console.print(f"no checkpoint yet in {report.path}: the rows are in the log", markup=False, highlight=False)
    if report.left_out is not None:
        console.print(_left_out_line(report.left_out), markup=False, highlight=False)
    if not report.snapshots:
        return
    console.print()
    console.print(_tables_grid(list(report.tables.values())))
    for saved in report.tables.values():
        _print_table(console, saved.table, in_full, slots)


def _left_out_line(left_out: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(left_out["seconds"], timezone.utc)
    return (
        f"left out at the start of {at:%Y-%m-%d %H:%M:%S} UTC: the last {left_out['bytes']:,} bytes of the log's file "
        f"{left_out['file']}, cut short by a crash or damaged: {left_out['message']}"
    )


def _snapshots_grid(report: CheckpointReport) -> Grid:
    own = report.snapshots[-1].lineage
    grid = _grid(f"snapshots in {report.path}", "snapshot", "parent", "time (UTC)", "kind", numbers=["bytes"])
    for snapshot in report.snapshots:
        kind = snapshot.kind if snapshot.lineage == own else f"{snapshot.kind}, of another store"
        grid.add_row(snapshot.id, snapshot.parent or "-", _time(snapshot), kind, f"{snapshot.bytes:,}")
    return grid


def _tables_grid(tables: list[SavedTableReport]) -> Grid:
    numbers = ["dim", "rows", "bytes", "step", "learning rate", "norm min", "mean", "max", "not finite"]
    grid = _grid("tables", "table", "dtype", "optimizer", numbers=numbers)
    for saved in tables:
        table, statistics = saved.table, saved.table.statistics
        names = escape(table.name), table.config.dtype, str(table.config.optimizer["kind"])
        counts = table.dim, statistics["rows"], saved.bytes, statistics["step"]
        norms = *_norms(table.norms), f"{saved.non_finite:,}"
        grid.add_row(*names, *(f"{count:,}" for count in counts), f"{statistics['learning_rate']:g}", *norms)
    return grid


def _norms(norms: RowNorms | None) -> tuple[str, str, str]:
    if norms is None:
        return "-", "-", "-"
    return f"{norms.minimum:.4g}", f"{norms.mean:.4g}", f"{norms.maximum:.4g}"


def _print_table(console: Console, table: TableReport, in_full: bool, slots: bool) -> None:
    if in_full:
        console.print()
        replace(table, rows=[]).print(console)
    if table.rows:
        console.print()
        console.print(_rows_grid(table, list(table.slots) if slots else []))


def _rows_grid(table: TableReport, slots: list[str]) -> Grid:
    grid = _grid(f'rows of table "{table.name}"', "id", "stored", "values", *slots)
    for row in table.rows:
        shown = [_vector(row.slots[name]) if row.is_stored else "-" for name in slots]
        grid.add_row(str(row.id), "yes" if row.is_stored else "no", _vector(row.values), *shown)
    return grid


def _vector(values: Tensor) -> str:
    return " ".join(f"{value:.6g}" for value in values.tolist())


def _grid(title: str, *columns: str, numbers: Sequence[str] = ()) -> Grid:
    grid = Grid(title=escape(title), title_justify="left", box=None)
    for name in columns:
        grid.add_column(escape(name), overflow="fold")
    for name in numbers:
        grid.add_column(name, justify="right", overflow="fold")
    return grid


def _time(snapshot: SnapshotReport) -> str:
    return snapshot.created.strftime("%Y-%m-%d %H:%M:%S")
