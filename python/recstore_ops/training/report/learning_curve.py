"""Draws logloss and AUC over the training rows of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from recstore_ops.training.quality.evaluation import Evaluation
from recstore_ops.training.report.plot_style import (
    PART_COLORS,
    TRAINING,
    finish,
    mark_epochs,
    marker_of,
    new_figure,
    save,
    use_log_scale_where_wide,
    use_rows_axis,
)
from recstore_ops.training.report.records import EvaluationRecord, StepRecord, best_record

# The running mean is over this part of all records: enough to see through noise, and to see an epoch's course.
_WINDOWS = 100


def draw_learning_curve(
    path: Path, title: str, steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]
) -> None:
    """Writes a PNG with logloss above and AUC below; the best evaluation is marked on both."""
    figure = new_figure(8, 7.5)
    figure.suptitle(title)
    loss_axes, auc_axes = figure.subplots(2, 1, sharex=True)
    _plot_training(loss_axes, steps, evaluations)
    training_lines = len(loss_axes.lines)
    _plot_parts(loss_axes, evaluations, lambda result: result.logloss)
    _plot_parts(auc_axes, evaluations, lambda result: result.auc)
    _show_late_losses(loss_axes, training_lines)
    _say_if_empty(auc_axes, evaluations)
    use_rows_axis(auc_axes)
    mark_epochs((loss_axes, auc_axes), evaluations)
    for axes, name in ((loss_axes, "logloss (nats)"), (auc_axes, "AUC")):
        axes.yaxis.set_major_formatter("{x:.6g}")
        finish(axes, ylabel=name)
    save(figure, path)


def _plot_training(axes: Axes, steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> None:
    if not steps:
        rows, losses = [record.rows for record in evaluations], [record.train_loss for record in evaluations]
        axes.plot(rows, losses, marker=marker_of(rows), color=TRAINING, label="training (mean since the last)")
        return
    rows = np.array([record.rows for record in steps], dtype=np.float64)
    losses = np.array([record.loss for record in steps])
    window = max(1, len(steps) // _WINDOWS)
    if window > 1:
        axes.plot(rows, losses, color=TRAINING, linewidth=0.5, alpha=0.3)
    smooth = running_mean(losses, np.diff(rows, prepend=0), window)
    label = "training (running mean)" if window > 1 else "training"
    axes.plot(rows, smooth, marker=marker_of(rows), color=TRAINING, label=label)


def running_mean(losses: NDArray[np.float64], weights: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Returns the weighted mean over the last `window` values, or all so far where they are fewer; all [N]."""
    sums, totals = np.append(0, (losses * weights).cumsum()), np.append(0, weights.cumsum())
    stops = np.arange(1, losses.size + 1)
    starts = np.maximum(stops - window, 0)
    return (sums[stops] - sums[starts]) / (totals[stops] - totals[starts])


def _plot_parts(axes: Axes, evaluations: Sequence[EvaluationRecord], figure_of: Callable[[Evaluation], float]) -> None:
    if not evaluations:
        return
    best = best_record(list(evaluations))
    when = "at the best" if best.validation and best.file is None else "at the end"
    for part, color in PART_COLORS.items():
        results = [(record.rows, _result(record, part)) for record in evaluations]
        points = [(rows, figure_of(result)) for rows, result in results if result is not None]
        at_best = _result(best, part)
        if at_best is not None:
            rows, figures = zip(*points, strict=True)
            label = f"{part}, {_text(figure_of(at_best))} {when}"
            axes.plot(rows, figures, marker=marker_of(points), color=color, label=label)
    if best.validation is not None and best.file is None and np.isfinite(figure_of(best.validation)):
        star = {"marker": "*", "markersize": 13, "markeredgecolor": "black", "linestyle": "none"}
        label = "best: lowest validation logloss"
        axes.plot(best.rows, figure_of(best.validation), color=PART_COLORS["validation"], label=label, **star)


def _result(record: EvaluationRecord, part: str) -> Evaluation | None:
    return {"validation": record.validation, "test": record.test}[part]


def _text(figure: float) -> str:
    if math.isnan(figure):
        return "undefined"
    return f"{figure:.4f}" if 0.001 <= figure < 1000 else f"{figure:.4g}"


def _show_late_losses(axes: Axes, training_lines: int) -> None:
    """Lets the first training losses leave the plot at its top where they would take more than half of it."""
    lines = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines]
    everything = np.concatenate(lines)
    use_log_scale_where_wide(axes, everything)
    if axes.get_yscale() == "log" or not np.isfinite(everything).any():
        return
    late = np.concatenate([line[line.size // 10 :] for line in lines[:training_lines]] + lines[training_lines:])
    low, high, late_high = np.nanmin(late), np.nanmax(everything), np.nanmax(late)
    if high - late_high > late_high - low > 0:
        margin = 0.1 * (late_high - low)
        axes.set_ylim(low - margin, late_high + margin)


def _say_if_empty(axes: Axes, evaluations: Sequence[EvaluationRecord]) -> None:
    drawn = [y for line in axes.lines for y in np.asarray(line.get_ydata(), dtype=float)]
    if np.isfinite(drawn).any():
        return
    held_out = any(record.validation or record.test for record in evaluations)
    reason = "no AUC: labels of one class only" if held_out else "no evaluation on held-out rows"
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", color="0.4")
    axes.set_yticks([])
