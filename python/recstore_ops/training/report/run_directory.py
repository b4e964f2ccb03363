"""The directory of a run, in which everything lies that it leaves.

- `config.json`: what it was configured by.
- `metrics.jsonl`: one record a line, told apart by `event`: `vocabulary`, `steps`, `evaluation`, at the end `segments`,
  `calibration` and `end`. A line is on disk as soon as it is recorded.
- `learning_curve.png`: logloss and AUC over training rows.
- `calibration.png`: predicted probabilities against observed shares, at the best evaluation.
- `table_growth.png`: rows and memory of the tables over training rows.
- `segments.csv`: figures by segment at the best evaluation, where segments were asked for.
- `events.out.tfevents.*`: the same figures for TensorBoard.

Plots are drawn at the end, also when that is an error or an interrupt. A run that ends before its first record leaves
no directory, so that its name stays free.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from recstore_ops.training.quality.calibration import calibration_bins
from recstore_ops.training.quality.evaluation import Scores
from recstore_ops.training.quality.segments import SegmentFigures, segment_figures, write_segments
from recstore_ops.training.report.calibration_plot import draw_calibration
from recstore_ops.training.report.event_file import EventFile
from recstore_ops.training.report.learning_curve import draw_learning_curve
from recstore_ops.training.report.records import EvaluationRecord, StepRecord, best_record
from recstore_ops.training.report.table_growth import draw_table_growth


class RunConfig(Protocol):
    """What a run is configured by."""

    @property
    def model(self) -> str:
        """Names the run where nobody does."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Returns what `config.json` is to hold."""
        ...


class RunDirectory:
    """Creates `<runs_dir>/<name>`, records a run into it, and draws the plots when it is closed; a context manager.

    Args:
        name: None takes the model's name and the time, with a number behind it if that is taken.

    Raises:
        ValueError: the directory exists; a run never writes into another run's directory. Or the
            name is not a plain directory name.
    """

    def __init__(self, runs_dir: Path, name: str | None, config: RunConfig) -> None:
        self._started = time.perf_counter()
        self.path = create_directory(runs_dir, name, config.model)
        self._steps: list[StepRecord] = []
        self._evaluations: list[EvaluationRecord] = []
        self._best_scores: Mapping[str, Scores] = {}
        text = json.dumps(config.as_json(), indent=2)
        (self.path / "config.json").write_text(text + "\n", encoding="utf-8")
        self._event_file = EventFile(self.path, config.as_json())

    @property
    def name(self) -> str:
        """The run's name, unique in its runs directory."""
        return self.path.name

    def record_steps(self, record: StepRecord) -> None:
        """Records what some steps gave."""
        self._steps.append(record)
        self.record_event(**record.as_json())
        self._event_file.record_steps(record)

    def record_evaluation(self, record: EvaluationRecord, scores: Mapping[str, Scores]) -> None:
        """Records an evaluation, and keeps its scores by part, "validation" and "test", if it is the best so far."""
        self._evaluations.append(record)
        if best_record(self._evaluations) is record:
            self._best_scores = dict(scores)
        self.record_event(**record.as_json())
        self._event_file.record_evaluation(record)

    def record_event(self, event: str, **figures: Any) -> None:
        """Appends a line to `metrics.jsonl`; such lines alone make no run."""
        line = json.dumps({"event": event, **figures}, allow_nan=False)
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def segments(self) -> dict[str, SegmentFigures]:
        """Returns the figures by segment of each part that has segments, at the best evaluation so far."""
        parts = self._best_scores.items()
        return {part: segment_figures(scores) for part, scores in parts if scores.segments is not None}

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._event_file.close()
        if not self._steps and not self._evaluations:
            shutil.rmtree(self.path)
            return
        seconds = time.perf_counter() - self._started
        self._write_segments()
        self._write_calibration()
        draw_learning_curve(self.path / "learning_curve.png", self.name, self._steps, self._evaluations)
        draw_table_growth(self.path / "table_growth.png", self.name, self._steps, self._evaluations)
        self.record_event("end", seconds=seconds, finished=error is None)

    def _write_segments(self) -> None:
        segments = self.segments()
        if not segments:
            return
        write_segments(self.path / "segments.csv", segments)
        for part, figures in segments.items():
            weighted_auc = figures.weighted_auc()
            self.record_event(
                "segments",
                part=part,
                segments=len(figures.ids),
                weighted_auc=None if math.isnan(weighted_auc) else weighted_auc,
                weighted_auc_rows=figures.weighted_auc_rows(),
            )

    def _write_calibration(self) -> None:
        if not self._best_scores:
            return
        draw_calibration(self.path / "calibration.png", self.name, self._best_scores)
        for part, scores in self._best_scores.items():
            error = calibration_bins(scores).expected_calibration_error()
            self.record_event("calibration", part=part, expected_calibration_error=error)


def create_directory(runs_dir: Path, name: str | None, stem: str) -> Path:
    """Makes `<runs_dir>/<name>` and returns it.

    Args:
        name: None takes the stem and the time, with a number behind it if that is taken.

    Raises:
        ValueError: it exists, or the name is not a plain directory name.
    """
    if name is None:
        return _create_unnamed(runs_dir, f"{stem}-{datetime.now():%Y%m%d-%H%M%S}")
    if not name or Path(name).name != name:
        raise ValueError(f"run name {name!r} is not a plain directory name")
    path = runs_dir / name
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"run {name!r} exists already: {path}; choose another name") from None
    return path


def _create_unnamed(runs_dir: Path, stem: str) -> Path:
    path, number = runs_dir / stem, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = runs_dir / f"{stem}-{number}"
        else:
            return path
