"""What the plots of a run share: colours, axes of training rows, and how a figure is made and written."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from recstore_ops.config.directory import replace_file
from recstore_ops.training.report.records import EvaluationRecord

# Matplotlib takes longer to import than all else that a run needs beside torch: it is imported when something is drawn.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Colours that colour-blind readers tell apart. Source: Okabe and Ito 2008, Color Universal Design.
TRAINING = "#0072B2"
PART_COLORS = {"validation": "#D55E00", "test": "#009E73"}
TABLES, PROCESS = "#0072B2", "#E69F00"
OURS, THEIRS = "#0072B2", "#D55E00"

_MOST_EPOCH_LINES = 20
_MOST_MARKERS = 60


def new_figure(width: float, height: float) -> Figure:
    """Returns a figure of that size in inches, made without pyplot: it needs no display and leaves no state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=path.suffix[1:])
    replace_file(path, content.getvalue())


def finish(axes: Axes, legend: Literal["best", "center right"] = "best", **labels: str) -> None:
    """Adds labels, grid and, where anything has one, a legend at that place."""
    axes.set(**labels)
    axes.grid(alpha=0.3, which="major")
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc=legend)


def marker_of(points: Sized) -> str:
    """Returns the marker of a line: points are shown where they are few enough to be told apart."""
    return "." if len(points) <= _MOST_MARKERS else ""


def abbreviate(axis: Axis) -> None:
    """Labels an axis with 1.5M for 1500000."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def use_rows_axis(axes: Axes) -> None:
    """Labels the x axis as training rows, abbreviated; it starts at 0."""
    abbreviate(axes.xaxis)
    axes.set_xlabel("training rows")
    axes.set_xlim(left=0)


def show_at_least(axes: Axes, height: float) -> None:
    """Widens the y axis to that height at least, so that differences without meaning do not fill the plot."""
    low, high = axes.get_ylim()
    missing = height - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def rows_per_epoch(evaluations: Sequence[EvaluationRecord]) -> float | None:
    """Returns the training rows of an epoch; None where no epoch was evaluated at its end."""
    whole = [record.rows / record.epoch for record in evaluations if record.epoch and record.epoch == int(record.epoch)]
    return whole[-1] if whole else None


def mark_epochs(panels: Sequence[Axes], evaluations: Sequence[EvaluationRecord]) -> None:
    """Draws thin lines where epochs end, on all panels, and numbers them above the first."""
    from matplotlib.ticker import FixedLocator

    per_epoch = rows_per_epoch(evaluations)
    if per_epoch is None:
        return
    epochs = round(evaluations[-1].rows / per_epoch, 6)
    shown = range(0, math.floor(epochs) + 1, math.ceil(epochs / _MOST_EPOCH_LINES))
    for axes in panels:
        for epoch in shown[1:]:
            axes.axvline(epoch * per_epoch, color="0.6", linewidth=0.6, zorder=0)
    top = panels[0].secondary_xaxis(
        "top", functions=(lambda rows: np.divide(rows, per_epoch), lambda n: np.multiply(n, per_epoch))
    )
    top.set_xlabel("epoch")
    top.xaxis.set_major_locator(FixedLocator(list(shown)))


def use_log_scale_where_wide(axes: Axes, values: ArrayLike) -> None:
    """Takes a logarithmic y axis where the finite values span more than two decades and none is 0 or less."""
    values = np.asarray(values, dtype=np.float64)
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")


def byte_unit(largest: float) -> tuple[float, str]:
    """Returns the bytes of the unit in which an amount of memory reads best, and its name."""
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
