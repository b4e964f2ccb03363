"""The command `recstore neighbours`: the ids whose rows are nearest to those of an id."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

from recstore_ops.cli.finished_run import FieldName, RunPath, TableName, WhichCheckpoint
from recstore_ops.training.run.finished_run import load
from recstore_ops.training.run.vectors import IndexName, Metric, Vectors, nearest, values_of_ids


def neighbours_command(
    run: RunPath,
    *,
    table: TableName,
    id: Annotated[
        str, typer.Option(help="Whose neighbours: an id, or with --field a value of it; 0x... is hexadecimal.")
    ],
    count: Annotated[int, typer.Option("-k", "--count", help="How many.", min=1)] = 10,
    metric: Annotated[Metric, typer.Option(help="Similarity; highest for the nearest ids.")] = "cosine",
    field: FieldName = None,
    index: Annotated[
        IndexName, typer.Option(help="Compare with every row, or search an index of faiss or hnswlib.")
    ] = "exact",
    which: WhichCheckpoint = "best",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, for scripts.")] = False,
) -> None:
    """Print the ids whose rows in a table of a finished run are nearest to that of an id."""
    vectors = Vectors(load(run, which=which), table, field)
    try:
        ids, scores = nearest(vectors, vectors.id_of(_parsed(id)), count, metric, index)
    except ImportError as error:
        raise ValueError(str(error)) from None
    values = [None] * ids.size if field is None else values_of_ids(ids).tolist()
    found = list(zip(ids.tolist(), values, scores.tolist(), strict=True))
    if as_json:
        print(json.dumps([_as_json(*each, metric) for each in found]))
    else:
        Console().print(_grid(found, metric, field))


def _parsed(text: str) -> int:
    try:
        number = int(text, 0)
    except ValueError:
        raise ValueError(f"--id takes an integer, got {text!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"--id takes an int64, got {number}")
    return number


def _as_json(id: int, value: int | None, score: float, metric: Metric) -> dict[str, int | float]:
    return {"id": id, **({} if value is None else {"value": value}), metric: score}


def _grid(found: Sequence[tuple[int, int | None, float]], metric: Metric, field: str | None) -> Grid:
    grid = Grid(box=None)
    for name in ("id", *([] if field is None else [field]), metric):
        grid.add_column(name, justify="right")
    for id, value, score in found:
        grid.add_row(str(id), *([] if value is None else [str(value)]), f"{score:.6f}")
    return grid
