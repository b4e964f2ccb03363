"""Draws predicted probabilities against observed shares: a reliability diagram."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recstore_ops.training.quality.calibration import CalibrationBins, calibration_bins
from recstore_ops.training.quality.evaluation import Evaluation, Scores
from recstore_ops.training.report.plot_style import PART_COLORS, finish, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
