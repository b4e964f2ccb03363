"""A file of predictions, one line or row of it for each input row, in the order of the input.

The columns are `row`, int64, the number of the row in its file from 0; `file`, if rows of several files are predicted;
`probability`, float32; and `label`, int8, if rows have labels.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet

from recstore_ops.config.paths import check_output_file, replacing
from recstore_ops.training.metrics.evaluation import Scores

_WRITERS = {".parquet": parquet.ParquetWriter, ".csv": csv.CSVWriter}


def check_output(path: Path, *, replaces: bool) -> None:
    """Checks the place of a file of predictions before the work on it; arguments and errors as `check_output_file`."""
    check_output_file(path, _WRITERS, replaces=replaces)


class PredictionsFile:
    """Writes predictions as they come to a temporary file, which moves to its place once all are written.

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
