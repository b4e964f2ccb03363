"""The plots of a run: losses, tables as they grow, calibration; and the colours and axes that they share."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence, Sized
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recstore_ops.config.directory import replace_file
from recstore_ops.training.metrics.calibration import CalibrationBins, calibration_bins
from recstore_ops.training.metrics.evaluation import FIGURE_TITLES, Evaluation, Scores
from recstore_ops.training.report.records import EvaluationRecord, StepRecord, best_record

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

_MAX_EPOCH_LINES = 20
_MAX_MARKERS = 60


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
    """Adds labels, a grid and, if anything is labelled, a legend at that place."""
    axes.set(**labels)
    axes.grid(alpha=0.3, which="major")
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc=legend)


def marker_of(points: Sized) -> str:
    """Returns the marker of a line: points are shown if they are few enough to be distinguished."""
    return "." if len(points) <= _MAX_MARKERS else ""


def abbreviate(axis: Axis) -> None:
    """Labels an axis with 1.5M for 1500000."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def use_rows_axis(axes: Axes) -> None:
    """Labels the x axis, which starts at 0, as training rows, abbreviated."""
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
    """Returns the training rows of an epoch; None if no epoch was evaluated at its end."""
    whole = [record.rows / record.epoch for record in evaluations if record.epoch and record.epoch == int(record.epoch)]
    return whole[-1] if whole else None


def mark_epochs(panels: Sequence[Axes], evaluations: Sequence[EvaluationRecord]) -> None:
    """Draws thin lines at the ends of epochs, on all panels, and numbers them above the first."""
    from matplotlib.ticker import FixedLocator

    per_epoch = rows_per_epoch(evaluations)
    if per_epoch is None:
        return
    epochs = round(evaluations[-1].rows / per_epoch, 6)
    shown = range(0, math.floor(epochs) + 1, math.ceil(epochs / _MAX_EPOCH_LINES))
    for axes in panels:
        for epoch in shown[1:]:
            axes.axvline(epoch * per_epoch, color="0.6", linewidth=0.6, zorder=0)
    top = panels[0].secondary_xaxis(
        "top", functions=(lambda rows: np.divide(rows, per_epoch), lambda n: np.multiply(n, per_epoch))
    )
    top.set_xlabel("epoch")
    top.xaxis.set_major_locator(FixedLocator(list(shown)))


def use_log_scale_where_wide(axes: Axes, values: ArrayLike) -> None:
    """Takes a logarithmic y axis if the finite values span more than two decades and none is 0 or less."""
    values = np.asarray(values, dtype=np.float64)
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")


def byte_unit(largest: float) -> tuple[float, str]:
    """Returns the bytes of the unit in which an amount of memory reads best, and its name."""
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


# The predictions between these quantiles are shown, on logarithmic axes if they span more than this factor.
_SHOWN = (0.001, 0.999)
_WIDE = 100
_HISTOGRAM_BINS = 60
_MARKERS = {"validation": "o", "test": "D"}

Range = tuple[float, float]


def draw_calibration(path: Path, title: str, scores_of_part: Mapping[str, Scores]) -> None:
    """Writes a PNG with the reliability diagram above and a histogram of the predictions below, zoomed to them."""
    bins_of_part = {part: calibration_bins(scores) for part, scores in scores_of_part.items()}
    predicted = _range_of_predictions(list(scores_of_part.values()))
    scale = "log" if predicted[0] > 0 and predicted[1] > _WIDE * predicted[0] else "linear"
    observed = _range_of_shares(list(bins_of_part.values()), predicted, scale)
    predicted = _widened(predicted, scale)
    figure = new_figure(7, 8.5)
    figure.suptitle(title)
    diagram, histogram = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    diagonal = np.linspace(*predicted, 500)
    diagram.plot(diagonal, diagonal, color="0.5", linestyle="--", label="perfectly calibrated")
    for part, scores in scores_of_part.items():
        bins = bins_of_part[part]
        _plot_bins(diagram, bins, observed[0], part, _label(part, scores, bins))
        _plot_histogram(histogram, scores, _edges(scale, predicted), part)
    diagram.set(xscale=scale, yscale=scale, xlim=predicted, ylim=observed)
    finish(diagram, ylabel="observed share of positives, with 95 % interval")
    finish(histogram, xlabel="predicted probability", ylabel="share of rows")
    save(figure, path)


def _range_of_predictions(scores: Sequence[Scores]) -> Range:
    quantiles = [np.quantile(part.probabilities().numpy(), _SHOWN) for part in scores]
    return float(min(low for low, _ in quantiles)), float(max(high for _, high in quantiles))


def _range_of_shares(all_bins: Sequence[CalibrationBins], predicted: Range, scale: str) -> Range:
    """From the least to the greatest share or prediction; above 0 on a logarithmic axis."""
    low = min(predicted[0], *(bins.low.min() for bins in all_bins))
    high = max(predicted[1], *(bins.high.max() for bins in all_bins))
    if scale == "log":
        shares = np.concatenate([bins.observed for bins in all_bins])
        low = min([predicted[0], *shares[shares > 0]])
    return _widened((float(low), float(high)), scale)


def _widened(ends: Range, scale: str) -> Range:
    low, high = ends
    if scale == "log":
        return low / 1.3, min(high * 1.3, 1)
    margin = max(0.05 * (high - low), 0.02 * high)  # where all predictions are equal too
    return max(low - margin, 0), min(high + margin, 1)


def _plot_bins(axes: Axes, bins: CalibrationBins, floor: float, part: str, label: str) -> None:
    # A logarithmic axis has no zero: a bin without positives sits on its lower edge.
    observed, low, high = (np.maximum(shares, floor) for shares in (bins.observed, bins.low, bins.high))
    style = {"marker": _MARKERS[part], "markersize": 4, "linewidth": 1, "color": PART_COLORS[part]}
    axes.plot(bins.predicted, observed, label=label, clip_on=False, **style)
    axes.vlines(bins.predicted, low, high, color=PART_COLORS[part], linewidth=3, alpha=0.3)


def _label(part: str, scores: Scores, bins: CalibrationBins) -> str:
    error, ratio = bins.expected_calibration_error(), Evaluation.of(scores).calibration
    all_in_all = "no positives" if math.isnan(ratio) else f"predicted / observed {ratio:.3f}"
    return f"{part}: {all_in_all}, ECE {error:.2g}, {len(scores):,} rows"


def _edges(scale: str, ends: Range) -> NDArray[np.float64]:
    spaced = np.geomspace if scale == "log" else np.linspace
    return spaced(*ends, _HISTOGRAM_BINS + 1)


def _plot_histogram(axes: Axes, scores: Scores, edges: NDArray[np.float64], part: str) -> None:
    counts, _ = np.histogram(scores.probabilities().numpy(), edges)
    axes.stairs(counts / len(scores), edges, color=PART_COLORS[part], linewidth=1.5, label=part)


# The running mean is over this part of all records: enough to see through noise, and to see an epoch's course.
_WINDOWS = 100


def draw_learning_curve(
    path: Path, title: str, steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]
) -> None:
    """Writes a PNG with logloss above and the other figures below; the best evaluation is marked on all."""
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
    """Returns the weighted mean over the last `window` values, or over all so far if they are fewer; all [N]."""
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
    """Cuts off the first training losses at the top of the plot if they would take more than half of it."""
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


_ABOVE = 1.15
"""The top of a plot, as a multiple of the greatest value."""


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
