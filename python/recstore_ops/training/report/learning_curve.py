"""Draws logloss and AUC, or recall@10 and NDCG@10 of models that retrieve, over the training rows of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recstore_ops.training.quality.evaluation import FIGURE_TITLES, Evaluation
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The running mean is over this part of all records: enough to see through noise, and to see an epoch's course.
_WINDOWS = 100


def draw_learning_curve(
    path: Path, title: str, steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]
) -> None:
    """Writes a PNG with logloss above and what else is judged by below; the best evaluation is marked on all."""
    names = _names_below(evaluations)
    figure = new_figure(8, 4.5 + 3 * len(names))
    figure.suptitle(title)
    loss_axes, *further = figure.subplots(1 + len(names), 1, sharex=True)
    _plot_training(loss_axes, steps, evaluations)
    training_lines = len(loss_axes.lines)
    _plot_parts(loss_axes, evaluations, "logloss")
    for name, axes in zip(names, further, strict=True):
        _plot_parts(axes, evaluations, name)
    _show_late_losses(loss_axes, training_lines)
    _say_if_empty(further[0], evaluations)
    use_rows_axis(further[-1])
    mark_epochs((loss_axes, *further), evaluations)
    titles = ["logloss (nats)", *(FIGURE_TITLES[name] for name in names)]
    for axes, ylabel in zip((loss_axes, *further), titles, strict=True):
        axes.yaxis.set_major_formatter("{x:.6g}")
        finish(axes, ylabel=ylabel)
    save(figure, path)


def _names_below(evaluations: Sequence[EvaluationRecord]) -> Sequence[str]:
    """The figures that have axes of their own."""
    results = (result for record in evaluations for result in (record.validation, record.test) if result is not None)
    retrieves = any(result.recall is not None for result in results)
    return ("recall_at_10", "ndcg_at_10") if retrieves else ("auc",)


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


def _plot_parts(axes: Axes, evaluations: Sequence[EvaluationRecord], name: str) -> None:
    if not evaluations:
        return
    best = best_record(list(evaluations))
    when = "at the best" if best.validation and best.file is None else "at the end"
    for part, color in PART_COLORS.items():
        results = [(record.rows, _result(record, part)) for record in evaluations]
        points = [(rows, result.figures()[name]) for rows, result in results if result is not None]
        at_best = _result(best, part)
        if at_best is not None:
            rows, figures = zip(*points, strict=True)
            label = f"{part}, {_text(at_best.figures()[name])} {when}"
            axes.plot(rows, figures, marker=marker_of(points), color=color, label=label)
    is_of_files = best.file is not None
    if best.validation is not None and not is_of_files and np.isfinite(best.validation.figures()[name]):
        star = {"marker": "*", "markersize": 13, "markeredgecolor": "black", "linestyle": "none"}
        label = "best: lowest validation logloss"
        axes.plot(best.rows, best.validation.figures()[name], color=PART_COLORS["validation"], label=label, **star)


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
