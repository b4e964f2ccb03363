"""Draws two runs of one model beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recstore_ops.training.quality.evaluation import FIGURE_TITLES
from recstore_ops.training.report.plot_style import (
    OURS,
    THEIRS,
    abbreviate,
    byte_unit,
    finish,
    marker_of,
    new_figure,
    save,
    show_at_least,
    use_log_scale_where_wide,
    use_rows_axis,
)
from recstore_ops.training.report.recorded_run import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ((OURS, "-"), (THEIRS, "--"))


def draw_comparison(path: Path, runs: Mapping[str, RecordedRun]) -> None:
    """Writes a PNG of two runs by name: logloss, AUC or recall@10, memory and speed."""
    figure = new_figure(13, 8.5)
    ((loss_axes, auc_axes), (speed_axes, memory_axes)) = figure.subplots(2, 2)
    part = _held_out_part(runs)
    _plot_losses(loss_axes, runs, part)
    ranking = "recall_at_10" if _has(runs, f"{part}_recall_at_10") else "auc"
    _plot_curves(auc_axes, runs, "evaluation", f"{part}_{ranking}")
    show_at_least(auc_axes, 0.01)
    _plot_speed(speed_axes, runs)
    unit = _plot_memory(memory_axes, runs)
    for axes in (loss_axes, auc_axes, memory_axes):
        use_rows_axis(axes)
    finish(loss_axes, title="Logloss", ylabel="logloss (nats)")
    finish(auc_axes, title=f"{FIGURE_TITLES[ranking]} on {part} rows", ylabel=FIGURE_TITLES[ranking])
    finish(speed_axes, title="Speed", ylabel="training rows a second")
    finish(memory_axes, legend="center right", title="Memory", ylabel=f"memory ({unit})")
    save(figure, path)


def _held_out_part(runs: Mapping[str, RecordedRun]) -> str:
    return "validation" if _has(runs, "validation_logloss") else "test"


def _has(runs: Mapping[str, RecordedRun], figure: str) -> bool:
    return any(figure in line for run in runs.values() for line in run.of_kind("evaluation"))


def _plot_losses(axes: Axes, runs: Mapping[str, RecordedRun], part: str) -> None:
    losses = []
    for (name, run), (color, style) in zip(runs.items(), _STYLES, strict=True):
        rows, training = run.curve("steps", "loss")
        axes.plot(rows, training, color=color, linestyle=style, linewidth=0.8, alpha=0.5, label=f"{name}, training")
        losses += training
    _plot_curves(axes, runs, "evaluation", f"{part}_logloss", f", {part}")
    use_log_scale_where_wide(axes, losses)
    axes.yaxis.set_major_formatter("{x:.6g}")


def _plot_curves(axes: Axes, runs: Mapping[str, RecordedRun], event: str, figure: str, suffix: str = "") -> None:
    for (name, run), (color, style) in zip(runs.items(), _STYLES, strict=True):
        rows, values = run.curve(event, figure)
        if rows:
            axes.plot(rows, values, color=color, linestyle=style, marker=marker_of(rows), label=f"{name}{suffix}")


def _plot_speed(axes: Axes, runs: Mapping[str, RecordedRun]) -> None:
    speeds = [run.rows_per_second() or 0 for run in runs.values()]
    bars = axes.bar(list(runs), speeds, color=[color for color, _ in _STYLES], width=0.5)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds])
    axes.margins(x=0.3, y=0.15)
    abbreviate(axes.yaxis)


def _plot_memory(axes: Axes, runs: Mapping[str, RecordedRun]) -> str:
    """Returns the unit of memory."""
    size, unit = byte_unit(max(run.peak("process_bytes") or 0 for run in runs.values()))
    for (name, run), (color, _) in zip(runs.items(), _STYLES, strict=True):
        for figure, what, style in (("process_bytes", "process (resident)", "-"), ("table_bytes", "tables", ":")):
            rows, amounts = run.curve("steps", figure)
            scaled = [amount / size for amount in amounts]
            axes.plot(rows, scaled, color=color, linestyle=style, marker=marker_of(rows), label=f"{name}, {what}")
    axes.set_ylim(bottom=0)
    return unit
