"""The command `recstore predict`: writes what a finished run's model says of each row of files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recstore_ops.cli.finished_run import (
    DEFAULT_BATCH_SIZE,
    BatchSize,
    RowFiles,
    RunPath,
    WhichCheckpoint,
    check_row_files,
    shown_scores,
)
from recstore_ops.config.command_options import path_option
from recstore_ops.training.data.input_files import kept
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.report.predictions_file import PredictionsFile, check_output
from recstore_ops.training.run.finished_run import LoadedRun, load

_Output = Annotated[Path, path_option("A file to write; ends in .parquet or .csv.", "--output", "-o")]
_Replace = Annotated[bool, typer.Option("--replace", help="Overwrite an existing output.")]


def predict_command(
    run: RunPath,
    paths: RowFiles,
    *,
    output: _Output,
    which: WhichCheckpoint = "best",
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    replace: _Replace = False,
) -> None:
    """Write the probability that the model of a finished run gives each row of files.

    The output has a row for each row of the input, in the same order. Its columns are the row's number in its file from
    0, the file if there are several, the probability, and the label if rows have labels.

    Rows are read with the options of the training run, but a bad row always ends the command.
    """
    check_row_files(paths)
    for path in paths:
        if path.resolve() == output.resolve():
            raise ValueError(f"{output} is the output and one of the files to read")
    check_output(output, replaces=replace)
    loaded = load(run, which=which)
    loaded.check_gives_probabilities()
    # All are opened first: an error in the last one's header comes before the work on the others.
    sources = [(path, loaded.open_rows([kept(path)], on_bad_line="stop")) for path in paths]
    has_labels = any(rows.has_labels for _, rows in sources)
    count = 0
    with PredictionsFile(output, names_files=len(paths) > 1, has_labels=has_labels) as predictions:
        for path, rows in sources:
            count += _write(predictions, loaded, rows, batch_size, str(path) if len(paths) > 1 else None)
    print(f"{output}: {count:,} rows")


def _write(predictions: PredictionsFile, loaded: LoadedRun, rows: RowSource, batch_size: int, file: str | None) -> int:
    count = 0
    for scores in shown_scores(loaded, rows, batch_size, "predicting" if file is None else file):
        predictions.write(scores, count, file)
        count += len(scores)
    return count
