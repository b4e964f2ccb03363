"""The command `recstore quantize`: what fewer bits a row cost a finished run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table as Grid

from recstore_ops.cli.export import Rows
from recstore_ops.cli.finished_run import RunPath, WhichCheckpoint, rows_like_trained
from recstore_ops.serving import EncodingName
from recstore_ops.training.run.choices import RETRIEVAL
from recstore_ops.training.run.finished_run import load
from recstore_ops.training.run.quantization import Quantization, quantize_run

_TABLE_COLUMNS = ("table", "encoding", "rows", "dim", "bytes", "RMS error", "of the rows' RMS", "largest error")


def quantize_command(
    run: RunPath,
    *,
    rows: Rows = None,
    which: WhichCheckpoint = "best",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, for scripts.")] = False,
) -> None:
    """Print what fewer bits a row cost a finished run: errors by table, loss of AUC and logloss.

    float32 is compared with bfloat16, float16, int8 and int4, each in a pass over the rows. Nothing is written:
    recstore export --encoding writes a bundle with such rows.
    """
    loaded = load(run, which=which)
    source = None if loaded.config.model in RETRIEVAL else rows_like_trained(loaded, rows)
    if source is not None and not source.has_labels:
        raise ValueError(f"the rows of {(rows or ['the run'])[0]} have no labels: nothing tells what the figures lose")
    compared = quantize_run(loaded, source, get_args(EncodingName))
    if as_json:
        print(json.dumps([_as_json(each) for each in compared], allow_nan=False))
        return
    console = Console()
    console.print(_tables(compared))
    if source is None:
        console.print(f"the scores of model {loaded.config.model} rank items: its figures are not compared")
    else:
        console.print(_figures(compared))


def _as_json(each: Quantization) -> dict[str, Any]:
    figures = None if each.evaluation is None else each.evaluation.as_json()
    return {"encoding": each.encoding, "tables": [asdict(table) for table in each.tables], "figures": figures}


def _tables(compared: list[Quantization]) -> Grid:
    grid = _grid(
        "tables", "table", "encoding", "rows", "dim", "bytes", "RMS error", "of the rows' RMS", "largest error"
    )
    for each in compared:
        for table in each.tables:
            share = table.rms / table.rms_of_rows if table.rms_of_rows else math.nan
            counts = (f"{table.rows:,}", f"{table.dim}", f"{table.bytes:,}")
            grid.add_row(
                table.table, each.encoding, *counts, f"{table.rms:.3g}", f"{share:.2%}", f"{table.largest:.3g}"
            )
    return grid


def _figures(compared: list[Quantization]) -> Grid:
    evaluations = [(each.encoding, each.evaluation) for each in compared if each.evaluation is not None]
    before = evaluations[0][1]
    grid = _grid(f"figures of {before.rows:,} rows", "encoding", "AUC", "lost", "logloss", "gained")
    for encoding, evaluation in evaluations:
        lost, gained = before.auc - evaluation.auc, evaluation.logloss - before.logloss
        grid.add_row(encoding, f"{evaluation.auc:.6f}", f"{lost:.2e}", f"{evaluation.logloss:.6f}", f"{gained:.2e}")
    return grid


def _grid(title: str, *columns: str) -> Grid:
    grid = Grid(title=title, title_justify="left", box=None)
    for column in columns:
        grid.add_column(column, justify="left" if column in ("table", "encoding") else "right")
    return grid
