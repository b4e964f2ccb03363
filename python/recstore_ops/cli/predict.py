"""The command `recstore predict`: writes what a finished run's model says of each row of files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
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
from recstore_ops.config.paths import check_output_file, replacing
from recstore_ops.training.data.input_files import kept
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.metrics.evaluation import Scores
from recstore_ops.training.run.finished_run import LoadedRun, load

_WRITERS = {".parquet": parquet.ParquetWriter, ".csv": csv.CSVWriter}


def check_output(path: Path, *, replaces: bool) -> None:
    """Checks the place of a file of predictions before the work on it; arguments and errors as `check_output_file`."""
    check_output_file(path, _WRITERS, replaces=replaces)


class PredictionsFile:
    """Writes predictions as they come to a temporary file, which moves to its place once all are written.

    The columns are `row`, int64, the number of the row in its file from 0; `file`, if rows of several files are
    predicted; `probability`, float32; and `label`, int8, if rows have labels.

    A context manager: an error within it leaves no new file, and an older one unchanged.

    Args:
        path: ends in .parquet or .csv, which selects the format; checked by `check_output`.
        names_files: whether there is a column `file`.
        has_labels: whether there is a column `label`.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, *, names_files: bool, has_labels: bool) -> None:
        file = [("file", pa.string())] if names_files else []
        label = [("label", pa.int8())] if has_labels else []
        self._schema = pa.schema([("row", pa.int64()), *file, ("probability", pa.float32()), *label])
        with ExitStack() as stack:
            (beside,) = stack.enter_context(replacing([path]))
            self._writer = stack.enter_context(_WRITERS[path.suffix](beside, self._schema))
            self._stack = stack.pop_all()

    def write(self, scores: Scores, first_row: int, file: str | None = None) -> None:
        """Appends the predictions of B rows.

        Args:
            scores: the model's predictions for them.
            first_row: the number of the first one.
            file: the file of the rows; only if there is a column `file`.
        """
        columns = {
            "row": np.arange(first_row, first_row + len(scores), dtype=np.int64),
            "file": None if file is None else pa.repeat(file, len(scores)),
            "probability": scores.probabilities().float().numpy(),
            "label": _labels(scores),
        }
        arrays = [pa.array(columns[name], self._schema.field(name).type) for name in self._schema.names]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))

    def __enter__(self) -> PredictionsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def _labels(scores: Scores) -> pa.Array:
    """The labels as integers; missing for a row without one."""
    labels = scores.labels.numpy()
    return pa.array(np.nan_to_num(labels).astype(np.int8), mask=np.isnan(labels))


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
