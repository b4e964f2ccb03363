"""Shared parts of the commands about finished runs: their arguments, and the progress over rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from recstore_ops.config.command_options import read_user_path
from recstore_ops.config.progress_bars import progress_bar
from recstore_ops.training.data.batch import regroup
from recstore_ops.training.data.read_ahead import read_ahead
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.metrics.evaluation import Scores
from recstore_ops.training.run.finished_run import LoadedRun
from recstore_ops.training.run.loop import EVALUATION_ROWS
from recstore_ops.training.run.saved_run import Which
from recstore_ops.training.run.training_input import open_input

RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="The directory of a run of `recstore train`.", parser=read_user_path)
]
RowFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="DATA",
        help="Files like those that the run was trained on, or pipes, as /dev/stdin.",
        parser=read_user_path,
    ),
]
WhichCheckpoint = Annotated[
    Which, typer.Option("--checkpoint", help="The model of the best evaluation, or the one of the last save.")
]
TableName = Annotated[str, typer.Option(help="A table as the model calls it: v has its factors, w its weights.")]
FieldName = Annotated[
    str | None, typer.Option(help="Only ids of this field, as movie.", show_default="ids of all fields")
]
BatchSize = Annotated[int, typer.Option(help="Rows that the model takes at once.", min=1)]

DEFAULT_BATCH_SIZE = EVALUATION_ROWS


def check_row_files(paths: Sequence[Path]) -> None:
    """Checks, before the work on them, that there are files to read.

    Raises:
        ValueError: there is no such file, or it is a directory.
    """
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such file: {path}")
        if path.is_dir():
            raise ValueError(f"{path} is a directory; give its files")


def shown_scores(
    run: LoadedRun, rows: RowSource, batch_size: int, what: str, segment_field: int | None = None
) -> Iterator[Scores]:
    """Yields the model's scores for rows, batch by batch; shows progress on a terminal."""
    batches = read_ahead(regroup(rows, batch_size))
    shown = progress_bar(None, total=rows.estimated_rows, desc=what, unit="row", unit_scale=True)
    with closing(batches), shown as bar:
        for scores in run.scores(batches, segment_field=segment_field):
            yield scores
            bar.update(len(scores))


def rows_like_trained(run: LoadedRun, paths: list[Path] | None) -> RowSource:
    """Returns the rows of files, or without files those of the run's test files, or else its training files.

    Raises:
        ValueError: the run's files are no longer there; further as `check_row_files` and `LoadedRun.open_rows`.
    """
    if paths:
        check_row_files(paths)
        return run.open_rows(paths)
    if gone := [path for path in (*run.config.train, *run.config.test) if not path.exists()]:
        raise ValueError(f"{gone[0]}, which the run was trained on, is no longer there: name rows like them by --rows")
    parts = open_input(run.config)
    return parts.test or parts.validation or parts.train
