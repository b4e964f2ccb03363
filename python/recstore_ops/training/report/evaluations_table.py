"""The evaluations of a run as a table of HTML: on the run's page, and in a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recstore_ops.config.html_table import html_table
from recstore_ops.training.quality.evaluation import FIGURE_TITLES, Evaluation
from recstore_ops.training.report.records import EvaluationRecord, best_record


class Evaluations(list[EvaluationRecord]):
    """The evaluations of a run, in order; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return evaluations_table(self)


def evaluations_table(evaluations: Sequence[EvaluationRecord]) -> str:
    """Returns a table with a row for each evaluation, of which the best stands out."""
    if not evaluations:
        return html_table(["epoch", "step", "train loss"], [])
    best = best_record(list(evaluations))
    parts = [part for part in ("validation", "test") if getattr(best, part) is not None]
    titles = [f"{part} {FIGURE_TITLES[name]}" for part in parts for name in getattr(best, part).figures()]
    rows = [_evaluation_row(record, parts) for record in evaluations]
    titles = ["epoch", "step", "train loss", *titles, "rows/s", "table rows"]
    if best.file is not None:
        titles.append("file")
        rows = [[*row, str(record.file)] for row, record in zip(rows, evaluations, strict=True)]
    return html_table(titles, rows, best=list(evaluations).index(best))


def _evaluation_row(record: EvaluationRecord, parts: Sequence[str]) -> list[str]:
    return [
        *(f"{record.epoch:g}", f"{record.step:,}", f"{record.train_loss:.4f}"),
        *_part_figures(record, parts),
        *(f"{record.rows_per_second:,.0f}", f"{record.table_rows:,}"),
    ]


def _part_figures(record: EvaluationRecord, parts: Sequence[str]) -> list[str]:
    figures: list[str] = []
    for part in parts:
        result: Evaluation | None = getattr(record, part)
        shown = ("", "", "") if result is None else result.figures().values()
        figures += [figure(each) for each in shown]
    return figures


def figure(value: float | str) -> str:
    """A figure as it stands in tables."""
    if isinstance(value, str):
        return value
    return "-" if math.isnan(value) else f"{value:.4f}"
