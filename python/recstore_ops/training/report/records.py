"""The records of a training run; `metrics.jsonl` holds one a line, and `event` names its kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from recstore_ops.training.metrics.evaluation import Evaluation


@dataclass(frozen=True)
class StepRecord:
    """The result of the steps since the last such record.

    Attributes:
        step: the number of steps so far, over all epochs.
        epoch: the epoch it lies in, from 1.
        rows: training rows so far, over all epochs.
        loss: the mean training loss over the rows since the last record, in nats, before each step.
        rows_per_second: over the time since the last record, evaluation not counted.
        lr: the learning rate of the tables at the last of these steps.
        table_rows, table_bytes: rows in all tables, and the bytes of memory that the tables take.
        process_bytes: resident memory of the process.
    """

    step: int
    epoch: int
    rows: int
    loss: float
    rows_per_second: float
    lr: float
    table_rows: int
    table_bytes: int
    process_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Returns the record flat."""
        return {"event": "steps", **asdict(self)}


@dataclass(frozen=True)
class EvaluationRecord:
    """The result of the training since the last evaluation, and the quality of the model now.

    Attributes:
        number: from 1.
        epoch: epochs so far; a fraction in the midst of one.
        step: the number of steps so far.
        rows: training rows so far, over all epochs.
        train_loss: the mean over `train_rows`, in nats, before each step.
        train_rows, seconds: training rows since the last evaluation, and the time that they took.
        validation, test: None without such rows.
        table_rows: rows in all tables.
        file: the file that a run that follows files was trained on last; None in other runs. `validation` is the
            evaluation of this file by the model before it was trained on the file.
    """

    number: int
    epoch: float
    step: int
    rows: int
    train_loss: float
    train_rows: int
    seconds: float
    validation: Evaluation | None
    test: Evaluation | None
    table_rows: int
    file: str | None = None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> EvaluationRecord:
        """Returns the record that `dataclasses.asdict` made these fields of."""
        parts = {part: fields[part] and Evaluation(**fields[part]) for part in ("validation", "test")}
        return cls(**{**fields, **parts})

    @property
    def rows_per_second(self) -> float:
        """Training rows per second, evaluation not counted."""
        return self.train_rows / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Returns the record flat; figures that are undefined or absent are None."""
        figures: dict[str, Any] = {
            "event": "evaluation",
            "number": self.number,
            "epoch": self.epoch,
            "step": self.step,
            "rows": self.rows,
            "train_loss": self.train_loss,
            "train_rows": self.train_rows,
            "train_seconds": self.seconds,
            "train_rows_per_second": self.rows_per_second,
            "table_rows": self.table_rows,
        }
        if self.file is not None:
            figures["file"] = self.file
        for part, result in (("validation", self.validation), ("test", self.test)):
            if result is not None:
                figures |= {f"{part}_{name}": figure for name, figure in result.as_json().items()}
        return figures


def best_record(records: list[EvaluationRecord]) -> EvaluationRecord:
    """Returns the evaluation of the lowest validation logloss; without validation rows the last.

    For followed files it is the last too, because each of these evaluations is about other rows.
    """
    if records[-1].file is not None:
        return records[-1]
    validated = [(r.validation.logloss, r.number) for r in records if r.validation]
    return records[min(validated)[1] - 1] if validated else records[-1]
