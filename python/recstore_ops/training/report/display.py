"""Shows a run: one line of figures an evaluation, and a progress bar on the standard error.

If the standard error is neither a terminal nor a notebook, there is no bar, and only the lines are written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recstore_ops.config.progress_bars import is_watched
from recstore_ops.training.metrics.evaluation import Evaluation
from recstore_ops.training.report.records import EvaluationRecord, StepRecord

# Names and widths of the columns of figures beside a logloss. "calib." is the mean predicted probability divided by the
# share of positives: 1 is right.
_OF_CLICKS = (("AUC", 6), ("calib.", 6))
_OF_RETRIEVAL = (("recall@10", 9), ("NDCG@10", 7))


def _columns(figures: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Names and widths of all columns, 100 characters in all, 108 for models that retrieve."""
    return (
        ("epoch", 6),
        ("train loss", 10),
        ("val logloss", 11),
        *figures,
        ("test logloss", 12),
        *figures,
        ("rows/s", 9),
        ("table rows", 10),
    )


class Display:
    """Observes the training loop and writes to a console; a context manager.

    Args:
        console: to write to.
        epochs: the most epochs of the run.
        retrieves: whether the model is one that retrieves.
        bar_file: the file for the bar; by default the standard error, if a person sees it.
    """

    def __init__(
        self, console: Console, epochs: int, *, retrieves: bool = False, bar_file: TextIO | None = None
    ) -> None:
        self._console = console
        self._columns = _columns(_OF_RETRIEVAL if retrieves else _OF_CLICKS)
        self._epochs = epochs
        self._wrote_header = False
        self._file: str | None = None
        self._noted: set[str] = set()
        self._bar_file = sys.stderr if bar_file is None and is_watched() else bar_file
        self._bar: tqdm[Any] = tqdm(disable=True)
        self._table_rows = 0

    def __enter__(self) -> Display:
        shown = self._bar_file is not None
        self._bar = tqdm(
            desc="reading", unit="row", unit_scale=True, leave=False, file=self._bar_file, disable=not shown
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def on_batch(self, epoch: int, rows: int, expected_rows: int | None, loss: float) -> None:
        """Moves the bar, which is redrawn at most ten times per second."""
        bar = self._bar
        if bar.disable:
            return
        if rows < bar.n or bar.n == 0:  # An epoch begins, or goes on after an evaluation: no rate counts from before.
            bar.n = bar.initial = bar.last_print_n = rows
        bar.total = None if expected_rows is None else max(expected_rows, rows)
        bar.set_description(
            f"epoch {epoch}/{self._epochs}" if self._file is None else f"file {epoch}: {self._file}", refresh=False
        )
        bar.set_postfix_str(f"loss {loss:.4f}, {self._table_rows:,} table rows", refresh=False)
        bar.update(rows - bar.n)

    def on_steps(self, record: StepRecord) -> None:
        """Shows beside the bar how the tables grow."""
        self._table_rows = record.table_rows

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Writes the evaluation's line; the time that it took does not count in the bar's rows per second."""
        self._write_header()
        cells = [
            _epoch(record.epoch),
            _loss(record.train_loss),
            *_figures(record.validation),
            *_figures(record.test),
            f"{record.rows_per_second:,.0f}",
            f"{record.table_rows:,}",
        ]
        self._write_cells(cells, "" if record.file is None else f"  {record.file}")
        self._note_one_class("validation", record.validation)
        self._note_one_class("test", record.test)
        self._table_rows = record.table_rows
        if not self._bar.disable:
            self._bar.reset()

    def on_file(self, path: Path) -> None:
        """Shows beside the bar which file the run works on."""
        self._file = path.name
        self._bar.set_description(f"evaluating {path.name}")

    def on_waiting(self, directory: Path) -> None:
        """Shows that the run waits for a file; without a bar, writes it the first time only."""
        self._bar.set_description(f"waiting for files in {directory}")
        if self._bar.disable and "waiting" not in self._noted:
            self._noted.add("waiting")
            self.note(f"waiting for files in {directory}")

    def note(self, text: str) -> None:
        """Writes a line among the others."""
        self._write(f"note: {text}")

    def show(self, table: Table) -> None:
        """Writes a table."""
        with tqdm.external_write_mode():
            self._console.print(table)

    def _write_header(self) -> None:
        if not self._wrote_header:
            self._write_cells([name for name, _ in self._columns], "" if self._file is None else "  file")
            self._wrote_header = True

    def _note_one_class(self, part: str, result: Evaluation | None) -> None:
        if result is not None and result.has_one_class and part not in self._noted:
            self._noted.add(part)
            self.note(f"the {part} rows have labels of one class only: no AUC")

    def _write_cells(self, cells: Sequence[str], end: str) -> None:
        aligned = (f"{cell:>{width}}" for cell, (_, width) in zip(cells, self._columns, strict=True))
        self._write("  ".join(aligned) + end)

    def _write(self, line: str) -> None:
        with tqdm.external_write_mode():
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _epoch(epochs: float) -> str:
    return f"{epochs:.0f}" if float(epochs).is_integer() else f"{epochs:.2f}"


def _figures(result: Evaluation | None) -> tuple[str, str, str]:
    if result is None:
        return "-", "-", "-"
    if result.recall is not None and result.ndcg is not None:
        return _loss(result.logloss), f"{result.recall:.4f}", f"{result.ndcg:.4f}"
    auc = "-" if result.has_one_class else f"{result.auc:.4f}"
    return _loss(result.logloss), auc, _calibration(result.calibration)


def _loss(nats: float) -> str:
    return f"{nats:.4f}" if nats < 1000 else f"{nats:.2e}"


def _calibration(ratio: float) -> str:
    if math.isnan(ratio):
        return "-"
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.3g}"
