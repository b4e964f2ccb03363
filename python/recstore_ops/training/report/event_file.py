"""Writes a run's figures to a TensorBoard event file, beside its other files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from recstore_ops.training.report.records import EvaluationRecord, StepRecord

# What is lost at most if the process is killed.
_FLUSH_SECONDS = 1


class EventFile:
    """Scalars over steps, at the time they were recorded; the file is written in the background and soon on disk.

    Args:
        directory: of the file, whose name TensorBoard looks for.
        config: shown as text.
        last_step: of a run that goes on, the last that counts of those in its earlier files; None for a new run.
    """

    def __init__(self, directory: Path, config: dict[str, Any], last_step: int | None = None) -> None:
        # As matplotlib: what only looks at the command does not wait for it.
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            str(directory),
            flush_secs=_FLUSH_SECONDS,
            purge_step=None if last_step is None else last_step + 1,
            # Two files of one second would have one name.
            filename_suffix="" if last_step is None else f".after-{last_step}",
        )
        if last_step is not None:
            return
        # TensorBoard reads text as Markdown, where an indented block is shown as it is.
        text = "\n".join(f"    {line}" for line in json.dumps(config, indent=2).splitlines())
        self._writer.add_text("configuration", text, 0)

    def record_steps(self, record: StepRecord) -> None:
        """Writes speed, loss and memory."""
        figures = {
            "train/loss": record.loss,
            "train/rows_per_second": record.rows_per_second,
            "train/lr": record.lr,
            "table/rows": record.table_rows,
            "table/bytes": record.table_bytes,
            "process/bytes": record.process_bytes,
        }
        self._write(record.step, figures)

    def record_evaluation(self, record: EvaluationRecord) -> None:
        """Writes the figures of the validation and test rows; those that are undefined are left out."""
        for part, result in (("validation", record.validation), ("test", record.test)):
            if result is not None:
                self._write(record.step, {f"{part}/{name}": figure for name, figure in result.figures().items()})

    def flush(self) -> None:
        """Waits until what was recorded is on its way to the disk, so that it stays if the process is killed."""
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._writer.close()

    def _write(self, step: int, figures: dict[str, float]) -> None:
        for name, figure in figures.items():
            if not math.isnan(figure):
                self._writer.add_scalar(name, figure, step)
