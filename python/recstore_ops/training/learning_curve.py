"""Draws loss and AUC per epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recstore_ops.training.evaluation import Evaluation
from recstore_ops.training.records import EpochRecord


def draw_learning_curve(path: Path, title: str, records: Sequence[EpochRecord]) -> None:
    """Writes a PNG with logloss above and AUC below, over the epochs of a run."""
    figure = Figure(figsize=(7, 7), layout="constrained")  # without pyplot: no display, no state
    loss_axes, auc_axes = figure.subplots(2, 1, sharex=True)
    epochs = [record.epoch for record in records]
    train_losses = [record.train_loss for record in records]
    loss_axes.plot(epochs, train_losses, marker=".", label="training (mean over the epoch)")
    _plot_parts(loss_axes, records, lambda result: result.logloss)
    _plot_parts(auc_axes, records, lambda result: result.auc)
    loss_axes.set(title=title, ylabel="logloss (nats)")
    auc_axes.set(xlabel="epoch", ylabel="AUC")
    auc_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss_axes, auc_axes):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=120)


def _plot_parts(axes: Axes, records: Sequence[EpochRecord], figure_of: Callable[[Evaluation], float]) -> None:
    parts = {
        "validation": [(r.epoch, r.validation) for r in records if r.validation],
        "test": [(r.epoch, r.test) for r in records if r.test],
    }
    for color, (label, points) in zip(("tab:orange", "tab:green"), parts.items(), strict=True):
        if points:
            epochs = [epoch for epoch, _ in points]
            figures = [figure_of(result) for _, result in points]
            axes.plot(epochs, figures, marker=".", color=color, label=label)
