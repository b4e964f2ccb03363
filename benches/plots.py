"""Plots, where matplotlib is installed: lookups and steps as multiples of the yardstick's time; steps of everyone."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.cells import TITLES, lookup, peers, step
from benches.cells.one_table import OURS, YARDSTICK
from benches.competitors import fbgemm
from benches.ids import DENSE
from benches.machine import ROOT
from benches.measured import Outcome, Timed
from benches.wording import described, differing

STEPS = ROOT / "docs" / "steps.svg"
_COLOURS = {OURS: "#0072B2", fbgemm.NAME: "#E69F00", peers.EMBEDDING_BAG: "#D55E00", peers.TORCHREC: "#999999"}

_LIMITS = {lookup.CELL: 1.3, step.CELL: 1.5}
_INCHES_PER_BAR = 0.22


def draw(path: Path, outcomes: Sequence[Outcome]) -> bool:
    """Writes a PNG with a bar a case; False where there is nothing to draw, or nothing to draw it with."""
    cells = {cell: _ratios(outcomes, cell) for cell in _LIMITS}
    if not any(cells.values()) or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    bars = sum(len(ratios) for ratios in cells.values())
    figure = Figure(figsize=(9, 2 + _INCHES_PER_BAR * bars), layout="constrained")
    heights = [max(1, len(ratios)) for ratios in cells.values()]
    for axes, (cell, ratios) in zip(figure.subplots(len(cells), height_ratios=heights), cells.items(), strict=True):
        _draw_cell(axes, cell, ratios)
    figure.savefig(path, dpi=120)
    return True


def _ratios(outcomes: Sequence[Outcome], cell: str) -> dict[str, float]:
    """The multiple of the yardstick's time of each case of a cell, by its description."""
    cases = [outcome for outcome in outcomes if isinstance(outcome, Timed) and outcome.cell == cell]
    names = differing(case.axes for case in cases)
    spreads = {described(case.axes, names) or cell: case.ratio(OURS, YARDSTICK) for case in cases}
    return {name: spread.median for name, spread in spreads.items() if spread is not None}


def _draw_cell(axes: Any, cell: str, ratios: dict[str, float]) -> None:
    axes.barh(list(ratios), list(ratios.values()), color="#0072B2")
    axes.axvline(_LIMITS[cell], color="#D55E00", label=f"target {_LIMITS[cell]}")
    axes.set(title=TITLES[cell], xlabel="times the yardstick")
    axes.tick_params(axis="y", labelsize="x-small")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize="small")


def draw_steps(path: Path, outcomes: Sequence[Outcome], machine: Mapping[str, str]) -> bool:
    """Writes an SVG with the steps per second of everyone in `peers`; False if one is missing, or matplotlib.

    Our ids are dense, as theirs are. The same figures give the same file.
    """
    cases = {
        case.axes["dim"]: case
        for case in outcomes
        if isinstance(case, Timed) and case.cell == peers.CELL and case.axes["ids"] == DENSE
    }
    steps = {dim: _steps_a_second(cases[dim]) for dim in peers.DIMS if dim in cases}
    if any(steps.get(dim, {}).keys() != _COLOURS.keys() for dim in peers.DIMS):
        return False
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "steps", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 3.2))
        figure.subplots_adjust(left=0.19, right=0.95, top=0.87, bottom=0.26, wspace=0.7)
        for axes, (dim, values) in zip(figure.subplots(1, len(steps)), steps.items(), strict=True):
            _draw_steps_of(axes, int(dim), values)
        figure.text(0.5, 0.03, _caption(machine), ha="center", fontsize=7.5, color="#444444", linespacing=1.5)
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
    return True


def _steps_a_second(case: Timed) -> dict[str, float]:
    spreads = {name: case.spread(name) for name in case.nanoseconds}
    return {name: 1e9 / spread.median for name, spread in spreads.items() if spread is not None}


def _draw_steps_of(axes: Any, dim: int, values: Mapping[str, float]) -> None:
    ordered = {name: values[name] for name in _COLOURS}
    bars = axes.barh(list(ordered), list(ordered.values()), color=[_COLOURS[name] for name in ordered])
    axes.bar_label(bars, [f"{value:,.0f}" for value in ordered.values()], padding=3)
    axes.set_title(f"steps per second, dim {dim}", fontsize=11)
    axes.set_xlim(0, 1.2 * max(ordered.values()))
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)


def _caption(machine: Mapping[str, str]) -> str:
    work = (
        f"{peers.TABLES} tables of {peers.ROWS:,} rows, dense ids, batches of {peers.EXAMPLES:,} examples, one id a "
        "table: lookup, backward, AdaGrad"
    )
    return (
        f"{work}\nall in one process on two threads; TorchRec's collection is sharded table-wise over that process\n"
        f"commit {machine['commit']}, {machine['processor']}, {machine['date']}"
    )
