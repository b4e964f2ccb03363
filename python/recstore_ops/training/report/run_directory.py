"""The directory of a run, which holds all of its output.

- `config.json`: its configuration.
- `rows.json`: the form of its rows; see `row_form`.
- `metrics.jsonl`: one record per line; `event` names its kind: `vocabulary`, `steps`, `evaluation`, at the end
  `segments`, `calibration` and `end`. A line is on disk as soon as it is recorded.
- `learning_curve.png`: logloss and AUC over training rows.
- `calibration.png`: predicted probabilities against observed shares, at the best evaluation.
- `table_growth.png`: rows and memory of the tables over training rows.
- `report.html`: all of that on one page that needs no other file, with the columns and the configuration.
- `segments.csv`: figures by segment at the best evaluation, if segments were asked for.
- `events.out.tfevents.*`: the same figures for TensorBoard.
- `checkpoint`, `best`: directories of checkpoints, if the run is saved; see `run_checkpoints`.

Plots are drawn at the end, also after an error or an interrupt. A run that ends before its first record or save leaves
no directory, so its name stays free.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from recstore_ops.config.directory import Directory
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.data.schema_file import SCHEMA, read_schema, write_schema
from recstore_ops.training.metrics.calibration import calibration_bins
from recstore_ops.training.metrics.evaluation import Scores
from recstore_ops.training.metrics.segments import SegmentFigures, segment_figures, write_segments
from recstore_ops.training.report.event_file import EventFile
from recstore_ops.training.report.html_page import RunPage
from recstore_ops.training.report.plots import draw_calibration, draw_learning_curve, draw_table_growth
from recstore_ops.training.report.recorded_run import CONFIG, FORM, LAST, open_run
from recstore_ops.training.report.records import EvaluationRecord, StepRecord, best_record

METRICS = "metrics.jsonl"

_BEFORE_RECORDS = (CONFIG, FORM, SCHEMA, METRICS)
"""The files that a run may have before its first record."""


class RunConfig(Protocol):
    """The configuration of a run."""

    @property
    def model(self) -> str:
        """The name of the model; a run without a name is called after it."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Returns the content of `config.json`."""
        ...


class RunDirectory:
    """Creates `<runs_dir>/<name>`, records a run into it, and draws the plots when it is closed; a context manager.

    Args:
        name: None takes the model's name and the time, with a number behind it if that is taken.
        resume: takes the directory of a run to resume; call `restore` or `restart` before anything is recorded.

    Raises:
        ValueError: the directory exists (a run never writes into another run's directory), or the name is not a plain
            directory name. With `resume`: the run is not found, its configuration differs, or another process is
            writing it.
    """

    def __init__(self, runs_dir: Path, name: str | None, config: RunConfig, *, resume: bool = False) -> None:
        self._started = time.perf_counter()
        self._config = config.as_json()
        self._resume = resume
        self.path = _find_directory(runs_dir, name) if resume else create_directory(runs_dir, name, config.model)
        self._files = open_run(self.path)
        self._steps: list[StepRecord] = []
        self._evaluations: list[EvaluationRecord] = []
        self._best_scores: Mapping[str, Scores] = {}
        if resume:
            _check_config(self._files, self._config)
        else:
            # In one move, for a run that is killed now and resumed.
            self._files.replace(CONFIG, (json.dumps(self._config, indent=2) + "\n").encode())
        self._lock = _lock(self._files)
        self._event_file = None if resume else EventFile(self.path, self._config)

    @property
    def name(self) -> str:
        """The run's name, unique in its runs directory."""
        return self.path.name

    def state_dict(self, *, with_scores: bool) -> dict[str, Any]:
        """Returns what was recorded so far, for `restore`; syncs the lines of `metrics.jsonl` to disk.

        Args:
            with_scores: whether to return the scores of the best evaluation too.
        """
        assert self._event_file is not None, "restore or restart comes first"
        self._event_file.flush()
        with self._files.append(METRICS) as file:
            # A save names these bytes, so they must be on the disk when it is.
            os.fsync(file.fileno())
            state = {"metrics_bytes": file.tell(), "seconds": time.perf_counter() - self._started}
        scores = {part: vars(scores) for part, scores in self._best_scores.items()}
        return {**state, "scores": scores if with_scores else None}

    def restart(self) -> None:
        """Discards all records, to begin anew."""
        self._cut_metrics(0)
        self._event_file = EventFile(self.path, self._config, last_step=0)

    def restore(
        self,
        state: dict[str, Any],
        evaluations: Sequence[EvaluationRecord],
        scores: dict[str, dict[str, Any]],
        last_step: int,
    ) -> None:
        """Resumes from a result of `state_dict`; discards later records.

        Args:
            state: the result.
            evaluations: recorded until then.
            scores: those returned at the best of them; none without any.
            last_step: the last step until then.

        Raises:
            ValueError: lines of `metrics.jsonl` are missing.
        """
        self._cut_metrics(state["metrics_bytes"])
        self._started -= state["seconds"]
        self._steps = _read_steps(self._files)
        self._evaluations = list(evaluations)
        self._best_scores = {part: Scores(**fields) for part, fields in scores.items()}
        self._event_file = EventFile(self.path, self._config, last_step=last_step)

    def record_steps(self, record: StepRecord) -> None:
        """Records the result of some steps."""
        assert self._event_file is not None, "restore or restart comes first"
        self._steps.append(record)
        self.record_event(**record.as_json())
        self._event_file.record_steps(record)

    def record_evaluation(self, record: EvaluationRecord, scores: Mapping[str, Scores]) -> None:
        """Records an evaluation, and keeps its scores by part, "validation" and "test", if it is the best so far."""
        assert self._event_file is not None, "restore or restart comes first"
        self._evaluations.append(record)
        if best_record(self._evaluations) is record:
            self._best_scores = dict(scores)
        self.record_event(**record.as_json())
        self._event_file.record_evaluation(record)

    def record_event(self, event: str, **figures: Any) -> None:
        """Appends a line to `metrics.jsonl`; such lines alone make no run."""
        line = json.dumps({"event": event, **figures}, allow_nan=False)
        with self._files.append(METRICS) as file:
            file.write(f"{line}\n".encode())

    def keep_schema(self, schema: Schema) -> None:
        """Writes the roles of the columns to `schema.toml`; a resumed run has it already.

        Raises:
            ValueError: the run began with another schema.
        """
        path = self.path / SCHEMA
        if not path.exists():
            write_schema(path, schema)
            return
        for before, now in zip_longest(read_schema(path).columns, schema.columns):
            if before != now:
                name = (before or now).name
                raise ValueError(f"run {self.name!r} has column {name!r} as {before}, got {now}")

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
        if self._event_file is not None:
            self._event_file.close()
            self._close(finished=error is None)
        self._lock.close()
        self._files.close()

    def _close(self, *, finished: bool) -> None:
        if not self._steps and not self._evaluations:
            if not self._resume and self._files.kind(LAST) is None:
                self._remove()
            return
        seconds = time.perf_counter() - self._started
        segments = self.segments()
        self._write_segments(segments)
        self._write_calibration()
        draw_learning_curve(self.path / "learning_curve.png", self.name, self._steps, self._evaluations)
        draw_table_growth(self.path / "table_growth.png", self.name, self._steps, self._evaluations)
        self._write_page(segments)
        self.record_event("end", seconds=seconds, finished=finished)

    def _remove(self) -> None:
        """Removes the directory of a run that has recorded nothing, unless it has other files."""
        for name in self._files.names():
            if name in _BEFORE_RECORDS or name.startswith("events.out.tfevents."):
                self._files.remove_file(name)
        with suppress(OSError):
            self.path.rmdir()

    def _write_page(self, segments: Mapping[str, SegmentFigures]) -> None:
        schema = self.path / SCHEMA
        page = RunPage(
            name=self.name,
            config=self._config,
            evaluations=self._evaluations,
            segments=segments,
            schema=read_schema(schema) if schema.exists() else None,
            plots={
                "Learning curve": self.path / "learning_curve.png",
                "Calibration": self.path / "calibration.png",
                "Table growth": self.path / "table_growth.png",
            },
        )
        page.write(self.path / "report.html")

    def _cut_metrics(self, size: int) -> None:
        with self._files.append(METRICS) as file:
            found = os.fstat(file.fileno()).st_size
            if found < size:
                path = self.path / METRICS
                raise ValueError(f"{path} has lost lines: expected at least {size} bytes, got {found}")
            file.truncate(size)

    def _write_segments(self, segments: Mapping[str, SegmentFigures]) -> None:
        if not segments:
            return
        write_segments(self.path / "segments.csv", segments)
        for part, figures in segments.items():
            weighted_auc, (recall, ndcg) = figures.weighted_auc(), figures.mean_ranking()
            self.record_event(
                "segments",
                part=part,
                segments=len(figures.ids),
                weighted_auc=None if math.isnan(weighted_auc) else weighted_auc,
                weighted_auc_rows=figures.weighted_auc_rows(),
                recall_at_10=None if math.isnan(recall) else recall,
                ndcg_at_10=None if math.isnan(ndcg) else ndcg,
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
    path = runs_dir / _plain(name)
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


def _plain(name: str) -> str:
    if not name or Path(name).name != name:
        raise ValueError(f"run name {name!r} is not a plain directory name")
    return name


def _find_directory(runs_dir: Path, name: str | None) -> Path:
    if name is None:
        raise ValueError("resume needs the name of the run: give run-name")
    path = runs_dir / _plain(name)
    if not (path / CONFIG).exists():
        raise ValueError(f"there is no run {name!r} to resume: {path} has no config.json")
    return path


def _check_config(run: Directory, config: dict[str, Any]) -> None:
    """Raises ValueError naming the first option of a run that differs, OSError if the file is damaged."""
    path = run.path
    try:
        before = json.loads(run.read(CONFIG))
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path / CONFIG} is damaged: {error}") from None
    if not isinstance(before, dict):
        raise OSError(f"{path / CONFIG} is damaged: expected an object, got {type(before).__name__}")
    # As the file has it: tuples become lists there.
    now = json.loads(json.dumps(config))
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"run {path.name!r} has {name} {before.get(name)!r}, got {now.get(name)!r}: "
                "a run is resumed with the options that it began with"
            )


def _lock(run: Directory) -> BinaryIO:
    """Keeps other processes from resuming the run as long as the file returned is open."""
    file = run.open(CONFIG)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"run {run.path.name!r} is under way in another process") from None
    except OSError:
        pass  # A file system without locks.
    return file


def _read_steps(run: Directory) -> list[StepRecord]:
    lines = map(json.loads, run.read(METRICS).decode().splitlines())
    steps = (
        {name: value for name, value in line.items() if name != "event"} for line in lines if line["event"] == "steps"
    )
    return [StepRecord(**fields) for fields in steps]
