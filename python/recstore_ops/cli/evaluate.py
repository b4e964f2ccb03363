"""The command `recstore evaluate`: figures of a finished run's model on files."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text

from recstore_ops.cli.finished_run import (
    DEFAULT_BATCH_SIZE,
    BatchSize,
    RowFiles,
    RunPath,
    WhichCheckpoint,
    check_row_files,
    shown_scores,
)
from recstore_ops.training.data.batch import field_number
from recstore_ops.training.data.input_files import kept
from recstore_ops.training.data.opening import named_rows
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.metrics.calibration import calibration_bins
from recstore_ops.training.metrics.evaluation import Evaluation, Scores, concatenated
from recstore_ops.training.metrics.retrieval import Candidates, RankedPart, Retriever, evaluate_retrieval
from recstore_ops.training.metrics.segments import SegmentFigures, SegmentOrder, in_number_parts, segment_figures
from recstore_ops.training.run.finished_run import LoadedRun, load

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
    "grouped_by": "rows are grouped by",
    "weighted_auc": "AUC within groups, weighted by rows",
    "group_recall_at_10": "recall@10 within groups",
    "group_ndcg_at_10": "NDCG@10 within groups",
    "skipped_rows": "bad rows left out",
}


def evaluate_command(
    run: RunPath,
    paths: RowFiles,
    *,
    which: WhichCheckpoint = "best",
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    segments_by: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also print figures of the rows of each value of this column of CSV or Parquet, whatever it is for, "
            "or of this field of other formats, or qid. Numbers are cut into ten ranges of equally many rows.",
            show_default=False,
        ),
    ] = None,
    segments_order: Annotated[
        SegmentOrder | None,
        typer.Option(
            help="Order of the segments: first those with most rows, the highest logloss, the lowest AUC, the greatest "
            "difference between the sum of predictions and the number of positive rows, or the smallest value.",
            show_default="rows, of ranges value",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
) -> None:
    """Evaluate the model of a finished run on files: AUC, logloss, calibration.

    Rows are read with the options of the training run. Memory holds 8 bytes a row. If the run's rows have groups, AUC,
    recall and NDCG within groups are printed too.

    A model that retrieves ranks the items of the files for the queries of their positive rows: recall@10, NDCG@10, and
    the logloss of the positive items among all. The files are read twice in this case.
    """
    if segments_by is None and segments_order is not None:
        raise ValueError("--segments-order needs segments: --segments-by names what they are of")
    check_row_files(paths)
    loaded = load(run, which=which)
    if isinstance(loaded.model, Retriever) and segments_by is not None:
        raise ValueError(f"model {loaded.config.model} takes no --segments-by: it ranks items for queries")
    rows = loaded.open_rows([kept(path) for path in paths], group_by=segments_by)
    if not rows.has_labels:
        raise ValueError(f"{paths[0]} has no labels: there is nothing to evaluate; recstore predict needs none")
    segments, order = None, "rows"
    if isinstance(loaded.model, Retriever):
        figures = _ranking_figures(loaded.model, rows)
    else:
        name, field = _grouping(loaded, rows, segments_by)
        scores = concatenated(list(shown_scores(loaded, rows, batch_size, "evaluating", field)))
        figures = _figures(scores, rows)
        if name is not None and scores.segments is not None:
            scores, order = _named_segments(scores, rows, segments_order)
            figures |= _within_groups(name, segment_figures(scores))
            segments = segment_figures(scores.with_rows_of_no_segment()).ordered(order)
    if as_json:
        if segments is not None and segments_by is not None:
            figures["segments"] = segments_as_json(segments)
        print(json.dumps({"run": str(run), "checkpoint": which, "step": loaded.step, **figures}, allow_nan=False))
        return
    Console().print(_grid(f"run {run}, checkpoint {which}, after step {loaded.step:,}", figures))
    if segments is not None and segments_by is not None:
        Console().print(segments_grid(segments_by, segments, order))


def _grouping(loaded: LoadedRun, rows: RowSource, segments_by: str | None) -> tuple[str | None, int | None]:
    """Returns the name of the rows' groups, if any, and the number of the field if the groups are its ids."""
    if rows.group_name is not None:
        return rows.group_name, None
    name, option = (loaded.config.auc_by, "auc_by") if segments_by is None else (segments_by, "--segments-by")
    return name, None if name is None else field_number(option, name, rows.field_names)


def _named_segments(scores: Scores, rows: RowSource, order: SegmentOrder | None) -> tuple[Scores, SegmentOrder]:
    """Returns scores whose segments have the texts that they stand for, and how they are ordered."""
    named = named_rows(rows)
    group = None if named is None else named.schema.group
    if group is not None and group.has_amounts:
        return in_number_parts(scores), order or "value"
    return scores.with_texts(rows.group_texts), order or "rows"


def _within_groups(name: str, segments: SegmentFigures) -> dict[str, Any]:
    recall, ndcg = segments.mean_ranking()
    figures = {
        "weighted_auc": segments.weighted_auc(),
        "group_recall_at_10": recall,
        "group_ndcg_at_10": ndcg,
    }
    return {"grouped_by": name, **{key: None if math.isnan(figure) else figure for key, figure in figures.items()}}


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
            # Names of columns are no markup.
            grid.add_row(words, Text(_shown(figures[name])))
    return grid


def _shown(figure: float | str | None) -> str:
    if isinstance(figure, str):
        return figure
    if figure is None or math.isnan(figure):
        return "-"
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.6f}"
