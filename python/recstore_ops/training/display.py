"""Shows a run on the terminal: a progress bar, and one line of figures an epoch.

Where the output is not a terminal there is no bar, and nothing is written but the lines.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from recstore_ops.training.evaluation import Evaluation
from recstore_ops.training.records import EpochRecord

_HEADER = "epoch  train loss  val logloss  val AUC  test logloss  test AUC     rows/s  table rows"


class Display:
    """An observer of the training loop that writes to a console; a context manager."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs
        self._wrote_header = False
        self._noted: set[str] = set()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            _RowsPerSecondColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("reading", total=None, loss=0.0)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def on_batch(self, epoch: int, rows: int, expected_rows: int | None, loss: float) -> None:
        """Moves the bar; rich redraws it a few times a second only."""
        self._progress.update(
            self._task,
            description=f"epoch {epoch}/{self._epochs}",
            completed=rows,
            total=None if expected_rows is None else max(expected_rows, rows),
            loss=loss,
        )

    def on_epoch(self, record: EpochRecord) -> None:
        """Writes the epoch's line and resets the bar."""
        self._write_header()
        self._write(
            f"{record.epoch:>5}  {_loss(record.train_loss):>10}  "
            f"{_figures(record.validation, 11, 7)}  {_figures(record.test, 12, 8)}  "
            f"{record.rows_per_second:>9,.0f}  {record.table_rows:>10,}"
        )
        self._note_one_class("validation", record.validation)
        self._note_one_class("test", record.test)
        self._progress.reset(self._task, description="evaluating", loss=record.train_loss)

    def note(self, text: str) -> None:
        """Writes a line among the others."""
        self._write(f"note: {text}")

    def _write_header(self) -> None:
        if not self._wrote_header:
            self._write(_HEADER)
            self._wrote_header = True

    def _note_one_class(self, part: str, result: Evaluation | None) -> None:
        if result is not None and result.has_one_class and part not in self._noted:
            self._noted.add(part)
            self.note(f"the {part} rows have labels of one class only: no AUC")

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _RowsPerSecondColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("- rows/s" if task.speed is None else f"{task.speed:,.0f} rows/s")


def _figures(result: Evaluation | None, logloss_width: int, auc_width: int) -> str:
    logloss = "-" if result is None else _loss(result.logloss)
    auc = "-" if result is None or result.has_one_class else f"{result.auc:.4f}"
    return f"{logloss:>{logloss_width}}  {auc:>{auc_width}}"


def _loss(nats: float) -> str:
    return f"{nats:.4f}" if nats < 1000 else f"{nats:.2e}"
