"""A run on one page of HTML, which needs no other file: figures, plots, columns, segments, configuration."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from recstore_ops.config.directory import read_file, replace_file
from recstore_ops.config.html_table import html_table
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.metrics.evaluation import FIGURE_TITLES, Evaluation
from recstore_ops.training.metrics.segments import SegmentFigures, SegmentOrder
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


_MAX_SEGMENTS = 20
_ORDERS: dict[SegmentOrder, str] = {
    "rows": "those with most rows",
    "error": "those whose predictions are furthest off in all",
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1, h2 { line-height: 1.2; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #8884; padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; }
td.figure, th.figure { font-variant-numeric: tabular-nums; text-align: right; }
tr.best { font-weight: bold; }
img { background: white; height: auto; max-width: 100%; }
"""


@dataclass(frozen=True)
class RunPage:
    """The content of the page.

    Attributes:
        name: of the run.
        config: its configuration.
        evaluations: in order.
        segments: figures by segment of each part at the best evaluation; none without segments.
        schema: the roles of the columns, if they have names.
        plots: files of PNG, under their titles; those that are not there are left out.
    """

    name: str
    config: Mapping[str, Any]
    evaluations: Sequence[EvaluationRecord]
    segments: Mapping[str, SegmentFigures]
    schema: Schema | None
    plots: Mapping[str, Path]

    def write(self, path: Path) -> None:
        """Writes the page, in one move."""
        parts = (self._evaluations(), self._plots(), self._columns(), self._segments(), self._configuration())
        page = (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width"><title>{escape(self.name)}</title>'
            f"<style>{_STYLE}</style></head>\n<body><h1>{escape(self.name)}</h1>\n{''.join(parts)}</body></html>\n"
        )
        replace_file(path, page.encode())

    def _evaluations(self) -> str:
        if not self.evaluations:
            return "<p>The run ended before its first evaluation.</p>\n"
        table = evaluations_table(self.evaluations)
        return f"<h2>Evaluations</h2>\n{table}<p>The model is that of the line in bold.</p>\n"

    def _plots(self) -> str:
        there = {title: path for title, path in self.plots.items() if path.is_file()}
        return "".join(f"<h2>{escape(title)}</h2>\n{_image(title, path)}" for title, path in there.items())

    def _columns(self) -> str:
        if self.schema is None:
            return ""
        rows = ([column.name, column.role, column.type, column.rule or column.reason] for column in self.schema.columns)
        return f"<h2>Columns</h2>\n{html_table(['column', 'role', 'type', 'rule'], rows, figures_from=4)}"

    def _segments(self) -> str:
        shown = (
            f"<h2>Segments of the {escape(part)} rows, {words}</h2>\n{_segment_table(figures.ordered(order))}"
            for part, figures in self.segments.items()
            for order, words in _ORDERS.items()
            if order == "rows" or len(figures) > 1
        )
        return "".join(shown)

    def _configuration(self) -> str:
        rows = ([name, str(value)] for name, value in self.config.items() if value is not None)
        return f"<h2>Configuration</h2>\n{html_table(['option', 'value'], rows, figures_from=2)}"


def _segment_table(figures: SegmentFigures) -> str:
    ratios = (figures.positive_shares(), figures.prediction, figures.logloss, figures.auc, figures.calibration)
    columns = zip(*(column[:_MAX_SEGMENTS].tolist() for column in (figures.rows, *ratios)), strict=True)
    # Of a million segments no text is made but of those that are shown.
    shown = (
        [name, f"{rows}", *map(figure, figures_of_one)]
        for name, (rows, *figures_of_one) in zip(figures.names(_MAX_SEGMENTS), columns, strict=True)
    )
    titles = ["segment", "rows", "share positive", "mean prediction", "logloss", "AUC", "calibration"]
    return html_table(titles, shown, figures_from=1)


def _image(title: str, path: Path) -> str:
    content = base64.b64encode(read_file(path)).decode("ascii")
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{content}">\n'
