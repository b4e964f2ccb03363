"""The page of a run: well-formed, complete, of one file, with whatever names and figures there are."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path

import numpy as np
import pytest
from html_tables import TableReader

from recstore_ops.training.data.schema import ColumnSchema, Schema
from recstore_ops.training.metrics.evaluation import Evaluation
from recstore_ops.training.metrics.segments import SegmentFigures
from recstore_ops.training.report.html_page import RunPage
from recstore_ops.training.report.records import EvaluationRecord

pytestmark = pytest.mark.tier("quick")

PNG = b"\x89PNG\r\n\x1a\n rest"


class Page(TableReader):
    """Cells of tables by row, headings, images and the page's balance."""

    void = frozenset({"meta", "img"})

    def __init__(self, text: str) -> None:
        self.best: list[int] = []
        self.headings: list[str] = []
        self.images: list[str] = []
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr" and ("class", "best") in attrs:
            self.best.append(len(self.rows))
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")
        super().handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def evaluation(number: int, logloss: float, auc: float = 0.75) -> EvaluationRecord:
    part = Evaluation(rows=100, positives=30, auc=auc, logloss=logloss, calibration=1.0)
    return EvaluationRecord(number, number / 2, 1000 * number, 256_000, 0.5, 256, 2.0, part, part, 12_345)


def page_of(path: Path, page: RunPage) -> tuple[Page, str]:
    page.write(path / "report.html")
    text = (path / "report.html").read_text(encoding="utf-8")
    assert not list(path.glob("*.new"))
    return Page(text), text


def test_the_page_has_all_of_a_run_and_needs_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(PNG)
    ids, ones = np.arange(30), np.full(30, 1.0)
    auc = np.where(ids > 0, 0.5, math.nan)
    segments = SegmentFigures(ids, ids + 5, ids, auc, ones / 4, ones, ones / 2, ones, ones, texts={1: "a <b>"})
    columns = (
        ColumnSchema("a <b>", "number", "number", "log"),
        ColumnSchema("when", "ignored", "time", reason="a time"),
    )
    name = 'run & <script>alert("x")</script>'
    page, text = page_of(
        tmp_path,
        RunPage(
            name=name,
            config={"model": "fm", "test": [], "dim": None, "note": "<i>"},
            evaluations=[evaluation(1, 0.6), evaluation(2, 0.4, math.nan), evaluation(3, 0.5)],
            segments={"test": segments},
            schema=Schema(columns, "train.csv"),
            plots={"Learning curve": tmp_path / "plot.png", "Calibration": tmp_path / "absent.png"},
        ),
    )
    assert page.headings == [
        *(name, "Evaluations", "Learning curve", "Columns"),
        *("Segments of the test rows, those with most rows",),
        *("Segments of the test rows, those whose predictions are furthest off in all", "Configuration"),
    ]
    evaluations = [row for row in page.rows if len(row) == 11]
    assert evaluations[2] == ["1", "2,000", "0.5000", *["0.4000", "-", "1.0000"] * 2, "128", "12,345"]
    assert page.best == [page.rows.index(evaluations[2])]
    assert ["a <b>", "number", "number", "ln(1 + |x|)"] in page.rows
    assert ["when", "ignored", "time", "a time"] in page.rows
    of_segments = [row for row in page.rows if len(row) == 7]
    assert of_segments[1:3] == [
        ["29", "34", "0.8529", "0.5000", "0.2500", "0.5000", "1.0000"],
        ["28", "33", "0.8485", "0.5000", "0.2500", "0.5000", "1.0000"],
    ]
    assert [row[0] for row in of_segments[21:25]] == ["segment", "29", "28", "27"]
    assert len(of_segments) == 42
    assert [row for row in page.rows if len(row) == 2][1:] == [["model", "fm"], ["test", "[]"], ["note", "<i>"]]
    (image,) = page.images
    assert base64.b64decode(image.removeprefix("data:image/png;base64,")) == PNG
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "<script" not in text


def test_a_run_without_an_evaluation(tmp_path: Path) -> None:
    page, text = page_of(tmp_path, RunPage("run", {"model": "fm"}, [], {}, None, {}))
    assert page.headings == ["run", "Configuration"]
    assert "The run ended before its first evaluation." in text


def test_a_run_without_test_rows(tmp_path: Path) -> None:
    record = evaluation(1, 0.5)
    record = EvaluationRecord(**{**vars(record), "test": None})
    page, _ = page_of(tmp_path, RunPage("run", {}, [record], {}, None, {}))
    assert page.rows[0] == [
        *("epoch", "step", "train loss", "validation logloss", "validation AUC", "validation calibration"),
        *("rows/s", "table rows"),
    ]
