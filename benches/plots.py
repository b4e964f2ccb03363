"""A plot of lookups and steps as multiples of the yardstick's time, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.cells import TITLES, lookup, step
from benches.cells.one_table import OURS, YARDSTICK
from benches.measured import Outcome, Timed
from benches.wording import described, differing

_LIMITS = {lookup.CELL: 1.3, step.CELL: 1.5}
_INCHES_A_BAR = 0.22


def draw(path: Path, outcomes: Sequence[Outcome]) -> bool:
    """Writes a PNG with a bar a case; False where there is nothing to draw, or nothing to draw it with."""
    cells = {cell: _ratios(outcomes, cell) for cell in _LIMITS}
    if not any(cells.values()) or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    bars = sum(len(ratios) for ratios in cells.values())
    figure = Figure(figsize=(9, 2 + _INCHES_A_BAR * bars), layout="constrained")
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
