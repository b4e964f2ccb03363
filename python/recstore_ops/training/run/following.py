"""Training on files as they arrive: each is evaluated, then trained on, then the run is saved.

The evaluations are progressive validation (Blum, Kalai and Langford 1999, Beating the Hold-Out): each row is predicted
once, by a model that has not seen it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from recstore_ops.training.metrics.evaluation import Scores
from recstore_ops.training.report.records import EvaluationRecord
from recstore_ops.training.run.checkpoints import RunCheckpoints, State
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.followed_files import FollowedFiles
from recstore_ops.training.run.job import Job
from recstore_ops.training.run.loop import Observer, Run
from recstore_ops.training.run.phases import Phases
from recstore_ops.training.run.training_input import TrainingInput
from recstore_ops.training.run.warm_start import DenseStart


def follow(
    config: TrainingConfig,
    model: nn.Module,
    rows: TrainingInput,
    files: FollowedFiles,
    observer: Observer,
    checkpoints: RunCheckpoints,
    start: DenseStart | None = None,
    phases: Phases | None = None,
) -> list[EvaluationRecord]:
    """Trains a model on files as they arrive and returns the record of each file.

    Args:
        config, model, observer, start, phases: as in `train`.
        rows: an input without rows, in the form of the files.
        files: begun.
        checkpoints: saves the run after each file, and resumes it from an earlier save. At the end the model is in its
            state after the last file.

    Raises:
        ValueError: a file is bad or has another form, or a loss is not finite. The state before the file is saved.
        OSError: a file cannot be read, the run cannot be saved, or what was saved is damaged.
        RunStopped: the run was asked to end, and was saved.
    """
    return _FollowingRun(config, model, rows, files, observer, checkpoints, phases).to_its_end(start)


class _FollowingRun(Run):
    """A run whose epochs are files; arguments as those of `follow`."""

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        rows: TrainingInput,
        files: FollowedFiles,
        observer: Observer,
        checkpoints: RunCheckpoints,
        phases: Phases | None,
    ) -> None:
        super().__init__(config, model, rows, observer, checkpoints, Job(), phases)
        self._files = files
        self._saves = checkpoints
        # Of the file under way, by the model before it.
        self._before: dict[str, Scores] | None = None

    def train_epoch(self) -> None:
        """Evaluates the next file and trains on it, but for those of its rows that were used before a save."""
        try:
            if (found := self._files.next()) is None:
                self._saves.raise_if_stopped(self._step)
                self.finished = True
                return
            self._file, self._input = found
            if self._before is None:
                self._evaluate_file()
            super().train_epoch()
        except (ValueError, OSError):
            self._saves.settle()
            if self._epoch > 1 and self._epoch_steps == 0:
                self._files.note("the run is saved as it was before this file: --resume goes on with the file")
            raise

    def _evaluate_file(self) -> None:
        self._before = super()._scores()
        for file in (file for read in self._input.read for file in read.skipped):
            self._files.note(f"bad lines skipped in {file.path}: {file.count}; the first: {file.first}")
        self._expected_rows = None
        self._since_log.restart()
        self._since_evaluation.restart()

    def _end_epoch(self) -> None:
        # Before the save that the end of the epoch makes: it must have the file as used.
        self._files.finish()
        super()._end_epoch()
        self._before = None

    def _scores(self) -> dict[str, Scores]:
        assert self._before is not None, "a file is evaluated first"
        return self._before

    def _is_after_last_epoch(self) -> bool:
        return False

    def _state_dict(self) -> State:
        before = None if self._epoch_steps == 0 or self._before is None else self._before
        return {
            **super()._state_dict(),
            "files": self._files.state_dict(),
            "before": before and {part: vars(scores) for part, scores in before.items()},
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        self._files.load_state_dict(state["files"])
        before = state["before"]
        self._before = before and {part: Scores(**fields) for part, fields in before.items()}
