"""Short training runs for tests, which leave no tables behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recstore_ops import RecStoreClient, table_names
from recstore_ops.training import (
    EvaluationRecord,
    Observer,
    Scores,
    StepRecord,
    TrainingConfig,
    build_model,
    open_input,
    train,
)


def train_new(config: TrainingConfig, name: str, observer: Observer | None = None) -> list[EvaluationRecord]:
    """Trains a new model and deletes its tables, so that the name is free again."""
    rows = open_input(config)
    vocabulary = rows.vocabulary() if config.tables == "nn" else None
    if vocabulary is not None:
        rows = rows.in_places_of(vocabulary)
    try:
        return train(config, build_model(config, name, rows.train, vocabulary), rows, observer)
    finally:
        drop_tables(name)


def drop_tables(prefix: str) -> None:
    """Deletes the tables `<prefix>/...`."""
    for table in table_names():
        if table.startswith(f"{prefix}/"):
            RecStoreClient().drop(table)


def with_own_tables(recstore: Callable[..., int], model: str) -> Callable[..., int]:
    """Returns what runs a command and leaves no tables of the model behind, as a process of its own would."""

    def run(*arguments: object) -> int:
        code = recstore(*arguments)
        drop_tables(model)
        return code

    return run


def metrics_of(run: Path, event: str) -> list[dict[str, Any]]:
    """The lines of one kind of a run's metrics."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] == event]


class Recorder:
    """Keeps what an observer is told."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int | None, float]] = []
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.scores: list[dict[str, Scores]] = []

    def on_batch(self, epoch: int, rows: int, expected_rows: int | None, loss: float) -> None:
        self.batches.append((epoch, rows, expected_rows, loss))

    def on_steps(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_evaluation(self, record: EvaluationRecord, scores: dict[str, Scores]) -> None:
        self.evaluations.append(record)
        self.scores.append(scores)
