"""Draws rows and memory of the tables over the training rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from recstore_ops.training.report.plot_style import (
    PROCESS,
    TABLES,
    abbreviate,
    byte_unit,
    finish,
    mark_epochs,
    marker_of,
    new_figure,
    save,
    use_rows_axis,
)
from recstore_ops.training.report.records import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ABOVE = 1.15
"""Of the greatest value, the top of a plot."""


def draw_table_growth(
    path: Path, title: str, steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]
) -> None:
    """Writes a PNG with the tables' rows above, and the memory of tables and process below."""
    figure = new_figure(8, 6.5)
    figure.suptitle(title)
    rows_axes, memory_axes = figure.subplots(2, 1, sharex=True)
    records = steps or evaluations
    rows = [record.rows for record in records]
    table_rows = [record.table_rows for record in records]
    label = f"all tables, {table_rows[-1]:,} at the end"
    rows_axes.plot(rows, table_rows, marker=marker_of(rows), color=TABLES, label=label)
    abbreviate(rows_axes.yaxis)
    unit = _plot_memory(memory_axes, steps)
    use_rows_axis(memory_axes)
    mark_epochs((rows_axes, memory_axes), evaluations)
    finish(rows_axes, ylabel="rows in tables")
    finish(memory_axes, legend="center right", ylabel=f"memory ({unit})")
    for axes in (rows_axes, memory_axes):
        top = axes.dataLim.ymax  # A flat line at the edge would not be seen; without a line there is no number.
        axes.set_ylim(0, _ABOVE * top if 0 < top < inf else None)
    save(figure, path)


def _plot_memory(axes: Axes, steps: Sequence[StepRecord]) -> str:
    """Returns the unit of memory."""
    size, unit = byte_unit(max((record.process_bytes for record in steps), default=0))
    if not steps:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="0.4")
        return unit
    rows = [record.rows for record in steps]
    lines = {
        "process (resident)": (PROCESS, [record.process_bytes / size for record in steps]),
        "tables": (TABLES, [record.table_bytes / size for record in steps]),
    }
    for name, (color, amounts) in lines.items():
        label = f"{name}, {amounts[-1]:,.1f} {unit} at the end"
        axes.plot(rows, amounts, marker=marker_of(rows), color=color, label=label)
    return unit
