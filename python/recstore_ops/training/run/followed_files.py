"""The files of a directory as a run trains on them: one after the other, all of the first one's form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from recstore_ops.config.paths import user_path
from recstore_ops.training.data.arriving_files import ArrivingFiles
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.row_source import CachedRows, MemoryRows
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.input_config import FollowOptions
from recstore_ops.training.run.row_form import RowForm, open_rows_of_run
from recstore_ops.training.run.stopping import RunStopped, StopRequest
from recstore_ops.training.run.training_input import TrainingInput, open_input


class FilesObserver(Protocol):
    """An observer of the files that arrive."""

    def on_file(self, path: Path) -> None:
        """Called when a file is next, before it is evaluated."""
        ...

    def on_waiting(self, directory: Path) -> None:
        """Called when there is no file to continue with."""
        ...

    def note(self, text: str) -> None:
        """Takes a sentence."""
        ...


class FollowedFiles:
    """Opens the files of `config.follow_files` in turn.

    Args:
        config: of the run.
        options: how the directory is polled.
        stop: asks the run to end.
        observer: its methods are called as files arrive.

    Raises:
        ValueError: there is no such directory.
    """

    def __init__(
        self, config: TrainingConfig, options: FollowOptions, stop: StopRequest, observer: FilesObserver
    ) -> None:
        assert config.follow_files is not None, "a run that follows files"
        directory = Path(user_path(config.follow_files, "follow_files"))
        self._files = ArrivingFiles(directory, options.every, observer.note, until=options.until)
        self._config = config
        self._options = options
        self._stop = stop
        self._observer = observer
        self._form: RowForm | None = None

    def begin(self, run: Path, *, is_new: bool) -> tuple[TrainingInput, RowForm]:
        """Returns an input without rows, to show what is known of the first file, and the form of all rows.

        Args:
            run: the directory of the run, which has the form already if the run is resumed.
            is_new: whether the run is not resumed; then this waits for the first file.

        Raises:
            ValueError: no file came, or the first one cannot be read.
            RunStopped: the run was asked to end before.
        """
        if not is_new:
            self._form = RowForm.read(run)
            return TrainingInput(_no_rows(self._form), None, None, schema=self._form.columns), self._form
        path = self._wait()
        if path is None:
            if self._stop.number is not None:
                raise RunStopped(self._stop.number, None)
            raise ValueError(self._why_none("in"))
        config = replace(self._config, train=(path,), follow_files=None)
        first = open_input(config)
        self._form = RowForm.of(config, first)
        return replace(first, train=_no_rows(self._form)), self._form

    def next(self) -> tuple[str, TrainingInput] | None:
        """Waits for a file; returns its name and its rows, both as training and as validation rows.

        Returns None if the run is asked to end, or if the options say that no more files come.

        Raises:
            ValueError: the file does not have the run's form; or it was under way, and has changed.
            OSError: it cannot be read.
        """
        assert self._form is not None, "begin comes first"
        path = self._wait()
        if path is None:
            if self._stop.number is None:
                self.note(f"{self._why_none('for')}: the run ends")
            return None
        rows = open_rows_of_run(self._config, self._form, [path], labels="required")
        # It is passed over twice.
        kept = CachedRows(rows, self._config.cache_bytes)
        return path.name, TrainingInput(kept, kept, None, (rows,), (), self._form.columns)

    def finish(self) -> None:
        """Marks the file under way as used."""
        self._files.finish()

    def note(self, text: str) -> None:
        """Passes a sentence on."""
        self._observer.note(text)

    def state_dict(self) -> dict[str, Any]:
        """Returns which files were used."""
        return self._files.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a result of `state_dict`."""
        self._files.load_state_dict(state)

    def _wait(self) -> Path | None:
        is_stopped, until_idle = (lambda: self._stop.number is not None), self._options.until_idle
        path = self._files.next(is_stopped, until_idle, self._observer.on_waiting)
        if path is not None:
            self._observer.on_file(path)
        return path

    def _why_none(self, idle_word: str) -> str:
        directory = self._files.directory
        if self._files.all_used:
            return f"{self._options.until} is in {directory}, and no file that is not used"
        return f"no file came to {directory} {idle_word} {self._options.until_idle:g} s"


def _no_rows(form: RowForm) -> MemoryRows:
    """Returns a source of this form without rows."""
    batch = Batch(
        ids=torch.empty(0, dtype=torch.int64, device="cpu"),
        labels=torch.empty(0, dtype=torch.float32, device="cpu"),
        num_fields=len(form.fields),
        dense=torch.empty(0, len(form.dense), dtype=torch.float32, device="cpu"),
    )
    return MemoryRows(
        batch, field_names=form.fields, dense_names=form.dense, sequences=form.sequences, group_name=form.group
    )
