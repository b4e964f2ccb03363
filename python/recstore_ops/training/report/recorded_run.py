"""A run as it was recorded, read back from its directory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recstore_ops.config.directory import Directory

CONFIG = "config.json"
FORM = "rows.json"
LAST, BEST = "checkpoint", "best"
"""The directories of a run's checkpoints."""


def open_run(path: Path) -> Directory:
    """Opens the directory of a run, whose own path may be a link.

    Raises:
        OSError: it is not there, or a link or something else takes the place of a file of it or its checkpoints.
    """
    run = Directory(path)
    try:
        run.check_plain()
        for name in (LAST, BEST):
            if run.kind(name) is not None:
                run.subdirectory(name).check_plain()
    except OSError as error:
        run.close()
        way = (
            f"{error.strerror}; a run may lie on another disk as a whole: link {path} itself, or give another runs-dir"
        )
        raise OSError(error.errno, way, os.fspath(error.filename)) from None
    return run


@dataclass(frozen=True)
class RecordedRun:
    """The contents of `config.json` and `metrics.jsonl` of a run.

    Attributes:
        name: of the run.
        config: its configuration.
        events: the lines of `metrics.jsonl`, in order.
    """

    name: str
    config: dict[str, Any]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> RecordedRun:
        """Reads the directory of a run.

        Raises:
            ValueError: a file is missing.
        """
        try:
            with open_run(path) as files:
                config = json.loads(files.read(CONFIG))
                lines = files.read("metrics.jsonl").decode().splitlines()
        except FileNotFoundError as error:
            raise ValueError(f"{path} is not the directory of a run: there is no {error.filename}") from None
        return cls(path.name, config, [json.loads(line) for line in lines])

    def of_kind(self, event: str) -> list[dict[str, Any]]:
        """Returns the events of one kind."""
        return [line for line in self.events if line["event"] == event]

    def best_evaluation(self) -> dict[str, Any] | None:
        """Returns the same evaluation as `best_record`; None if there is none."""
        evaluations = self.of_kind("evaluation")
        validated = [line for line in evaluations if "validation_logloss" in line and "file" not in line]
        if validated:
            return min(validated, key=lambda line: line["validation_logloss"])
        return evaluations[-1] if evaluations else None

    def training_seconds(self) -> float | None:
        """Returns the seconds spent in training; None without an evaluation, since evaluations record them."""
        evaluations = self.of_kind("evaluation")
        return sum(line["train_seconds"] for line in evaluations) if evaluations else None

    def rows_per_second(self) -> float | None:
        """Returns the mean over all of training; None without an evaluation."""
        seconds = self.training_seconds()
        return sum(line["train_rows"] for line in self.of_kind("evaluation")) / seconds if seconds else None

    def peak(self, figure: str) -> float | None:
        """Returns the greatest value of a figure of the steps; None without any."""
        return max((line[figure] for line in self.of_kind("steps")), default=None)

    def curve(self, event: str, figure: str) -> tuple[list[int], list[float]]:
        """Returns training rows and a figure of all events of one kind that have it."""
        points = [(line["rows"], line[figure]) for line in self.of_kind(event) if line.get(figure) is not None]
        return [rows for rows, _ in points], [value for _, value in points]
