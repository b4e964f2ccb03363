"""Figures by segment as `recstore evaluate` shows them: some on the terminal, all in JSON."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from recstore_ops.training.metrics.segments import SegmentFigures, SegmentOrder

_MAX_SHOWN = 20
_ORDERS: dict[SegmentOrder, str] = {
    "rows": "most rows first",
    "logloss": "highest logloss first",
    "auc": "lowest AUC first",
    "error": "sum of predictions furthest from the positive rows first",
    "value": "smallest value first",
}


def segments_as_json(figures: SegmentFigures) -> list[dict[str, Any]]:
    """Returns an object a segment, in their order; None for an undefined figure."""
    ratios = {
        "positive_share": figures.positive_shares(),
        "mean_prediction": figures.prediction,
        "logloss": figures.logloss,
        "auc": figures.auc,
        "recall_at_10": figures.recall,
        "ndcg_at_10": figures.ndcg,
    }
    shares = zip(*(each.tolist() for each in ratios.values()), strict=True)
    counts = zip(figures.names(), figures.rows.tolist(), figures.positives.tolist(), strict=True)
    return [
        {
            **dict(zip(("segment", "rows", "positives"), whole, strict=True)),
            **{name: None if math.isnan(x) else x for name, x in zip(ratios, of_one, strict=True)},
        }
        for whole, of_one in zip(counts, shares, strict=True)
    ]


def segments_grid(name: str, figures: SegmentFigures, order: SegmentOrder) -> Group:
    """Returns the first segments as a table, under a line that describes them.

    Args:
        name: the field or column of the segments.
        figures: in their order.
        order: the name of that order.
    """
    shown = min(len(figures), _MAX_SHOWN)
    some = "" if shown == len(figures) else f", {shown} of {len(figures):,}; --json has all"
    # Whatever stands in files is no markup.
    title = Text(f"segments by {name}, {_ORDERS[order]}{some}")
    grid = Grid(box=None, pad_edge=False)
    grid.add_column("segment", overflow="fold")
    for words in ("rows", "share positive", "mean prediction", "logloss", "AUC"):
        grid.add_column(words, justify="right")
    columns = (figures.positive_shares(), figures.prediction, figures.logloss, figures.auc)
    ratios = zip(*(column[:shown].tolist() for column in columns), strict=True)
    for segment, rows, of_one in zip(figures.names(shown), figures.rows[:shown].tolist(), ratios, strict=True):
        grid.add_row(Text(segment), f"{rows:,}", *("-" if math.isnan(x) else f"{x:.4f}" for x in of_one))
    # Its title would be as narrow as the table.
    return Group(title, grid)
