"""What a run records of each epoch; `metrics.jsonl` of a run holds one record a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recstore_ops.training.evaluation import Evaluation


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch gave. `train_loss` is the mean over its rows, in nats, before each step."""

    epoch: int
    train_loss: float
    train_rows: int
    seconds: float
    validation: Evaluation | None
    test: Evaluation | None
    table_rows: int

    @property
    def rows_per_second(self) -> float:
        """Training rows a second, evaluation not counted."""
        return self.train_rows / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Returns the record flat; figures that are undefined or absent are None."""
        figures: dict[str, Any] = {
            "epoch": self.epoch,
            "train_loss": self.train_loss,
            "train_rows": self.train_rows,
            "train_seconds": self.seconds,
            "train_rows_per_second": self.rows_per_second,
            "table_rows": self.table_rows,
        }
        for part, result in (("validation", self.validation), ("test", self.test)):
            figures[f"{part}_rows"] = result.rows if result else 0
            figures[f"{part}_logloss"] = result.logloss if result else None
            figures[f"{part}_auc"] = None if not result or result.has_one_class else result.auc
        return figures


def best_record(records: list[EpochRecord]) -> EpochRecord:
    """Returns the epoch of the lowest validation logloss; without validation rows the last."""
    validated = [(r.validation.logloss, r.epoch) for r in records if r.validation]
    return records[min(validated)[1] - 1] if validated else records[-1]
