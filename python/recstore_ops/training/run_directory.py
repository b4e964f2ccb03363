"""The directory of a run: `config.json`, `metrics.jsonl` and `learning_curve.png`.

A line of `metrics.jsonl` is on disk as soon as its epoch is over. A run that fails before its first
epoch is over leaves no directory, so that its name stays free.
"""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from types import TracebackType

from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.learning_curve import draw_learning_curve
from recstore_ops.training.records import EpochRecord


class RunDirectory:
    """Creates `<runs_dir>/<name>`, records epochs into it, and draws the curve when it is closed.

    Args:
        name: None takes the model's name and the time, with a number behind it if that is taken.

    Raises:
        ValueError: the directory exists; a run never writes into another run's directory. Or the
            name is not a plain directory name.
    """

    def __init__(self, runs_dir: Path, name: str | None, config: TrainingConfig) -> None:
        self.path = _create(runs_dir, name, config.model)
        self._records: list[EpochRecord] = []
        text = json.dumps(config.as_json(), indent=2)
        (self.path / "config.json").write_text(text + "\n", encoding="utf-8")

    @property
    def name(self) -> str:
        """The run's name, unique in its runs directory."""
        return self.path.name

    def record(self, record: EpochRecord) -> None:
        """Appends one line to `metrics.jsonl`."""
        self._records.append(record)
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_json(), allow_nan=False) + "\n")

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._records:
            draw_learning_curve(self.path / "learning_curve.png", self.name, self._records)
        else:
            shutil.rmtree(self.path)


def _create(runs_dir: Path, name: str | None, model: str) -> Path:
    if name is None:
        return _create_unnamed(runs_dir, f"{model}-{datetime.now():%Y%m%d-%H%M%S}")
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
