"""The files of a directory as a run trains on them: one after the other, all of the first one's form."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from recstore_ops.config.paths import user_path
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.input_files import is_left_over
from recstore_ops.training.data.row_source import CachedRows, MemoryRows
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.input_config import FollowOptions
from recstore_ops.training.run.row_form import RowForm, open_rows_of_run
from recstore_ops.training.run.stopping import RunStopped, StopRequest
from recstore_ops.training.run.training_input import TrainingInput, open_input

_MAX_SECONDS_ASLEEP = 0.1


class ArrivingFiles:
    """Returns the files of a directory in the order of their names, each once, when they are complete.

    A file is complete when its size has stayed the same between two polls that are at least `every` seconds apart.
    Empty files, directories and files left by editors (`is_left_over`) are ignored. A file that is still growing
    holds back the files after it.

    A file that appears after a later one was used is not returned. A used file that changes is not returned again.
    Both cases are noted, once. A used file may be removed.

    Args:
        directory: the directory; files in its subdirectories are not returned.
        every: the polling interval in seconds.
        note: takes a sentence for people.
        now: a clock in seconds.
        until: the name of a file that marks the end: no more files come. This file itself is not returned.

    Attributes:
        all_used: whether that file was there, and all others were used, when the last one was waited for.

    Raises:
        ValueError: there is no such directory.
    """

    def __init__(
        self,
        directory: Path,
        every: float,
        note: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        until: str | None = None,
    ) -> None:
        if not directory.is_dir():
            raise ValueError(f"no such directory to follow: {directory}")
        self.directory = directory
        self.all_used = False
        self._every = every
        self._note = note
        self._until = until
        self._now = now
        self._last: str | None = None
        self._used: dict[str, int] = {}
        self._under_way: tuple[str, int] | None = None
        # What the looks so far have seen of files that were not used: a size, and since when.
        self._seen: dict[str, tuple[int, float]] = {}
        self._noted: set[str] = set()

    def next(
        self, is_stopped: Callable[[], bool], until_idle: float | None, on_waiting: Callable[[Path], None]
    ) -> Path | None:
        """Waits for the next file, or returns the one that was under way when the state was saved.

        Args:
            is_stopped: whether to stop waiting.
            until_idle: stop waiting after so many seconds in which no file came or grew; None waits for ever.
            on_waiting: called with the directory before each pause.

        Returns:
            The file, which is under way from now on. None if waiting ended without a file, or if all files were used
            and the file that marks the end is there.

        Raises:
            ValueError: the file that was under way has changed.
            OSError: it is gone, or the directory cannot be read.
        """
        if self._under_way is not None:
            return self._unchanged(*self._under_way)
        idle_since = self._now()
        while not is_stopped():
            before = dict(self._seen)
            # Whatever was written before that file is there in the look that follows.
            is_complete = self._is_complete()
            if (path := self.look()) is not None:
                return path
            self.all_used = is_complete and not self._seen
            if self.all_used:
                return None
            if self._seen != before:
                idle_since = self._now()
            if until_idle is not None and self._now() - idle_since >= until_idle:
                return None
            on_waiting(self.directory)
            self._sleep(is_stopped)
        return None

    def look(self) -> Path | None:
        """Polls the directory once; returns the next file if it is complete, which is under way from now on."""
        sizes = self._sizes()
        self._forget_removed(sizes)
        now = self._now()
        seen = {}
        for name, size in sizes.items():
            if not self._is_late(name, size):
                seen_size, since = self._seen.get(name, (-1, now))
                seen[name] = (size, since if size == seen_size else now)
        self._seen = seen
        # The first name, even if it still grows: a complete one behind it waits, or its rows would come too early.
        name = min(seen, default=None)
        if name is None or now - seen[name][1] < self._every:
            return None
        # With its size, by which a resumed run sees that it goes on with the same file.
        self._under_way = (name, seen[name][0])
        return self.directory / name

    def finish(self) -> None:
        """Marks the file under way as used."""
        assert self._under_way is not None
        name, size = self._under_way
        self._seen.pop(name, None)
        self._used[name] = size
        self._last = name
        self._under_way = None

    def state_dict(self) -> dict[str, Any]:
        """Returns which files were used so far, without those that were removed since."""
        return {"last": self._last, "used": dict(self._used), "under_way": self._under_way}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a result of `state_dict`."""
        self._last, self._used = state["last"], dict(state["used"])
        self._under_way = None if state["under_way"] is None else (state["under_way"][0], state["under_way"][1])

    def _is_complete(self) -> bool:
        return self._until is not None and (self.directory / self._until).exists()

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for path in self.directory.iterdir():
            if not is_left_over(path) and path.name != self._until:
                try:
                    size = path.stat().st_size if path.is_file() else 0
                except FileNotFoundError:
                    continue  # Moved away since.
                if size > 0:
                    sizes[path.name] = size
        return sizes

    def _forget_removed(self, sizes: dict[str, int]) -> None:
        for name in self._used.keys() - sizes.keys():
            del self._used[name]
        self._noted &= sizes.keys()

    def _is_late(self, name: str, size: int) -> bool:
        """Whether a file's turn is over; notes it if its rows were not used."""
        if self._last is None or name > self._last:
            return False
        used = self._used.get(name)
        # Each file is noted once, however often the directory is looked at.
        if used != size and name not in self._noted:
            self._noted.add(name)
            path = self.directory / name
            self._note(
                f"{path} came after {self._last} was used: it is not trained on"
                if used is None
                else f"{path} had {used:,} bytes when it was used, now it has {size:,}: the change is not trained on"
            )
        return True

    def _unchanged(self, name: str, size: int) -> Path:
        path = self.directory / name
        found = path.stat().st_size
        if found != size:
            raise ValueError(f"{path} had {size:,} bytes when the run began with it, now it has {found:,}")
        return path

    def _sleep(self, is_stopped: Callable[[], bool]) -> None:
        """Sleeps until the next poll. A signal does not end a sleep, so each sleep is short."""
        end = self._now() + self._every
        while not is_stopped() and (left := end - self._now()) > 0:
            time.sleep(min(left, _MAX_SECONDS_ASLEEP))


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
