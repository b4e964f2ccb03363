"""The command `recstore evaluate`: figures of a finished run's model on files."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from recstore_ops.cli.finished_run import (
    DEFAULT_BATCH_SIZE,
    BatchSize,
    RowFiles,
    RunPath,
    WhichCheckpoint,
    shown_scores,
)
from recstore_ops.training.finished_run import load
from recstore_ops.training.quality.calibration import calibration_bins
from recstore_ops.training.quality.evaluation import Evaluation, Scores, concatenated
from recstore_ops.training.quality.retrieval import Candidates, RankedPart, Retriever, evaluate_retrieval
from recstore_ops.training.rows.piped_files import kept
from recstore_ops.training.rows.row_source import RowSource

_TITLES = {
    "rows": "rows",
    "positives": "positive rows",
    "positive_share": "share of positive rows",
    "auc": "AUC",
    "logloss": "logloss, nats",
    "calibration": "mean prediction / share of positives",
    "expected_calibration_error": "calibration error",
    "queries": "queries of positive rows",
    "candidates": "items ranked, all of these files",
    "recall_at_10": "recall@10",
    "ndcg_at_10": "NDCG@10",
    "skipped_rows": "bad rows left out",
}


def evaluate_command(
    run: RunPath,
    paths: RowFiles,
    *,
    which: WhichCheckpoint = "best",
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
) -> None:
    """Print how good the model of a finished run is on files: AUC, logloss, calibration.

    Rows are read with the options that the run was trained with. It keeps 8 bytes a row.

    A model that retrieves ranks the items of the files for the queries of their positive rows: recall@10, NDCG@10, and
    the logloss of the positive items among all. Files are read twice then.
    """
    loaded = load(run, which=which)
    rows = loaded.open_rows([kept(path) for path in paths])
    if not rows.has_labels:
        raise ValueError(f"{paths[0]} has no labels: there is nothing to evaluate; recstore predict needs none")
    if isinstance(loaded.model, Retriever):
        figures = _ranking_figures(loaded.model, rows)
    else:
        figures = _figures(concatenated(list(shown_scores(loaded, rows, batch_size, "evaluating"))), rows)
    if as_json:
        print(json.dumps({"run": str(run), "checkpoint": which, "step": loaded.step, **figures}, allow_nan=False))
    else:
        Console().print(_grid(f"run {run}, checkpoint {which}, after step {loaded.step:,}", figures))


def _figures(scores: Scores, rows: RowSource) -> dict[str, Any]:
    evaluation = Evaluation.of(scores)
    return {
        **evaluation.as_json(),
        "positives": evaluation.positives,
        "positive_share": evaluation.positives / evaluation.rows,
        "expected_calibration_error": calibration_bins(scores).expected_calibration_error(),
        "skipped_rows": rows.skipped_lines,
    }


def _ranking_figures(model: Retriever, rows: RowSource) -> dict[str, Any]:
    candidates = Candidates(model.sides, [rows])
    part = RankedPart.of(model.sides, rows, candidates)
    return {
        **evaluate_retrieval(model, candidates, part).as_json(),
        "positives": part.positives,
        "positive_share": part.positives / part.rows,
        "queries": len(part.queries),
        "candidates": len(candidates),
        "skipped_rows": rows.skipped_lines,
    }


def _grid(title: str, figures: dict[str, Any]) -> Grid:
    grid = Grid(title=title, title_justify="left", box=None, show_header=False)
    grid.add_column()
    grid.add_column(justify="right")
    for name, words in _TITLES.items():
        if name in figures:
            grid.add_row(words, _shown(figures[name]))
    return grid


def _shown(figure: float | None) -> str:
    if figure is None or math.isnan(figure):
        return "-"
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.6f}"
