"""What a run that follows files takes of the options of other runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recstore_ops.training.bounds import Bounds
from recstore_ops.training.choices import RETRIEVAL


@dataclass(frozen=True)
class FollowOptions:
    """How a directory is looked at; no part of a run's configuration, so that it may differ when the run goes on.

    Attributes:
        every: seconds between two looks.
        until_idle: the run ends when no file came for so many seconds; None waits until it is asked to end.
        until: the run ends when a file of this name is in the directory and all others are used.

    Raises:
        ValueError: a number is not above 0, or the name is that of no file within the directory.
    """

    every: float = 1.0
    until_idle: float | None = None
    until: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("--follow-every", self.every), ("--follow-until-idle", self.until_idle)):
            if value is not None:
                Bounds(above=0).check(name, value)
        if self.until is not None and (self.until in ("", "..") or Path(self.until).name != self.until):
            raise ValueError(f"--follow-until takes the name of a file in the directory, got {self.until!r}")


def check_following(config: Any) -> None:
    """Refuses what has no meaning for files that arrive, before defaults are filled in.

    Args:
        config: a `TrainingConfig`.

    Raises:
        ValueError: names the option and says why.
    """
    is_other = config.epochs not in (None, 1)
    for is_given, sentence in (
        (config.planted, "takes no planted rows: its rows are those of the files"),
        (config.train, "takes no training files: all rows come from the directory"),
        (config.test, "takes no test files: it is evaluated on each file before it is trained on it"),
        (config.tables != "store", f"takes no tables {config.tables}: which ids will come is not known beforehand"),
        (config.model in RETRIEVAL, f"takes no model {config.model}: which items will come is not known beforehand"),
        (is_other, f"passes over each file once: it takes no epochs {config.epochs}"),
        (config.schedule != "constant", f"has no end known beforehand: it takes no schedule {config.schedule}"),
        (config.validation_fraction, "holds no rows out: it is evaluated on each file before it is trained on it"),
        (config.patience, "goes on whatever its evaluations are: it takes no patience"),
        (config.evaluate_every, "is evaluated once a file: it takes no evaluate_every"),
    ):
        if is_given:
            raise ValueError(f"a run that follows files {sentence}")
