"""Checkpoints of a training run, from which it resumes.

A run's directory has two directories of checkpoints: `checkpoint` for the run's last save, and `best` for its best
evaluation. Each is a checkpoint of `recstore_ops.checkpoint` with one more file for each snapshot: the state of the
run besides the tables. That file is written first, under a new name, which the snapshot's metadata holds. So neither
is ever there without the other.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import secrets
import shutil
import signal
import zipfile
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recstore_ops import checkpoint, sharding
from recstore_ops.checkpoint.saving import SaveReport
from recstore_ops.config.directory import Directory
from recstore_ops.training.report.recorded_run import BEST, LAST
from recstore_ops.training.report.run_directory import RunDirectory
from recstore_ops.training.run.job import Job
from recstore_ops.training.run.stopping import RunStopped, StopRequest

MANIFEST = "manifest.json"

_FORMAT, _VERSION = "recstore-unfinished", 1
_NOTE = "-unfinished.json"


def mirror_checkpoint(source: Path, target: Path) -> None:
    """Makes `target` a copy of the checkpoint directory `source`, by hard links if the file system supports them.

    Files of a checkpoint never change, and the manifest is replaced atomically: `target` holds its old checkpoint or
    the new one, whenever this ends. Only files that the manifest no longer lists are removed. No other process may
    write to either directory meanwhile.

    Raises:
        OSError: a file cannot be read or written, or is not a regular file.
    """
    with Directory(source.parent) as run, run.subdirectory(source.name) as old, Directory(target.parent) as run:
        _mirror(old, run.create_subdirectory(target.name))


def _mirror(source: Directory, target: Directory) -> None:
    # The remains of a copy that was cut off would be in the way of the links below.
    _remove_unneeded(target)
    files, before = files_of(source), files_of(target)
    # Written first: it lists files to come and files to go. After a kill those go that the manifest does not list.
    note = f"{secrets.token_hex(8)}{_NOTE}"
    target.replace(note, json.dumps({"format": _FORMAT, "version": _VERSION, "files": sorted(files ^ before)}).encode())
    for name in sorted(files - before):
        _link(source, target, name)
    # Last, when all files that it lists are there.
    target.replace(MANIFEST, source.read(MANIFEST))
    _remove_unneeded(target)


def snapshots_of(directory: Directory) -> list[dict[str, Any]]:
    """The snapshots of a run's checkpoint directory, the newest last; empty if no save has ended yet.

    Raises:
        OSError: the manifest is damaged.
    """
    try:
        text = directory.read(MANIFEST)
    except FileNotFoundError:
        return []
    try:
        return json.loads(text)["snapshots"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OSError(f"{directory.path / MANIFEST} is damaged: it tells no snapshots") from None


def files_of(directory: Directory) -> set[str]:
    """The names of the files that the manifest of a run's checkpoint directory lists.

    Raises:
        OSError: the manifest is damaged.
    """
    try:
        return {name for snapshot in snapshots_of(directory) for name in _files_of(snapshot)}
    except (KeyError, TypeError):
        raise OSError(f"{directory.path / MANIFEST} is damaged: it does not tell its files") from None


def _files_of(snapshot: dict[str, Any]) -> Iterator[str]:
    yield str(snapshot["metadata"]["dense"])
    for table in snapshot["tables"]:
        yield from (str(shard["file"]) for shard in table["shards"])


def _remove_unneeded(directory: Directory) -> None:
    """Removes files that notes list and the manifest does not, and then the notes."""
    notes = [(name, _noted(directory, name)) for name in directory.names() if name.endswith(_NOTE)]
    needed = files_of(directory)
    for note, files in notes:
        if files is None:
            continue
        for name in files - needed:
            with suppress(FileNotFoundError):
                directory.remove_file(name)
        directory.remove_file(note)
    directory.sync()


def _noted(directory: Directory, name: str) -> set[str] | None:
    """The files that a note lists; None if the file is not a note despite its name."""
    try:
        note = json.loads(directory.read(name))
        return set(note["files"]) if (note["format"], note["version"]) == (_FORMAT, _VERSION) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _link(source: Directory, target: Directory, name: str) -> None:
    try:
        source.link(name, target)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links. Until the manifest lists it, it may lack some of its content.
        with source.open(name) as content, target.create_new(name) as copy:
            shutil.copyfileobj(content, copy)
            # Else the manifest may reach the disk before this content does.
            os.fsync(copy.fileno())


State = dict[str, Any]

DENSE = "dense-"
"""The prefix of the names of files with the state of the run besides the tables."""

_DENSE_NAME = re.compile(rf"{DENSE}[0-9a-f]{{16}}\.pt")


@dataclass(frozen=True)
class SaveOptions:
    """How a run is saved, and whether it resumes or overwrites tables.

    Attributes:
        every: steps between saves, besides those at the end of each epoch; None saves at these only.
        keep: how many full snapshots to keep, with the deltas that follow them.
        resume: resume from the last save.
        replace_tables: overwrite the rows that tables of the run's names have already, as they may on servers.

    Raises:
        ValueError: a number is below 1.
    """

    every: int | None = None
    keep: int = 1
    resume: bool = False
    replace_tables: bool = False

    def __post_init__(self) -> None:
        for name, value in (("--save-every", self.every), ("--keep", self.keep)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class RunCheckpoints:
    """Saves a run and restores its saves.

    Args:
        path: the run's directory.
        run: its records are saved too.
        options: how.
        stop: asks the run to end.
    """

    def __init__(self, path: Path, run: RunDirectory | None, options: SaveOptions, stop: StopRequest) -> None:
        self.path, self.best_path = path / LAST, path / BEST
        self._run = run
        self._options = options
        self._stop = stop
        self._saving: Future[SaveReport] | None = None
        self._saving_best = False
        self._full_bytes = self._delta_bytes = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the run is asked to end."""
        return self._stop.number is not None

    def stop(self) -> None:
        """Asks the run to end, as another of its processes was."""
        self._stop.number = self._stop.number or signal.SIGTERM

    def is_due(self, step: int) -> bool:
        """Whether to save after a step: by its number, or because the run is asked to end."""
        every = self._options.every
        return self.is_stopped or (every is not None and step % every == 0)

    def save(self, state: State, *, is_best: bool) -> None:
        """Saves the tables as they are now, and `state` with them; the tables are written in the background.

        Args:
            state: plain values and tensors, `step` and `epoch` among them.
            is_best: whether this is the state of the best evaluation so far, to be kept in `best` too.

        Raises:
            OSError: this save or the one before could not be written.
        """
        self.settle()
        assert self._run is not None, "a run of one process has its directory"
        name = f"{DENSE}{secrets.token_hex(8)}.pt"
        recorded = self._run.state_dict(with_scores=is_best)
        # On the disk before the save begins, whose manifest names the file.
        write_state(self.path / name, {**state, "is_best": is_best, "recorded": recorded})
        metadata = {"dense": name, "step": state["step"], "epoch": state["epoch"]}
        # Deltas are written until they weigh as much as the full snapshot that they follow.
        kind = "full" if self._delta_bytes >= self._full_bytes else "auto"
        self._saving_best = is_best
        self._saving = checkpoint.save_async(self.path, kind=kind, keep=self._options.keep, metadata=metadata)

    def settle(self) -> None:
        """Waits for the save under way.

        Raises:
            OSError: it could not be written.
        """
        if self._saving is None:
            return
        # Taken out first: a save that failed raises once, and does not stand in the way of the next.
        saving, self._saving = self._saving, None
        with as_os_error("the run could not be saved"):
            report = saving.result()
        if report.is_delta:
            self._delta_bytes += report.bytes
        else:
            self._full_bytes, self._delta_bytes = report.bytes, 0
        self.remove_unneeded()
        if self._saving_best:
            mirror_checkpoint(self.path, self.best_path)

    def raise_if_stopped(self, step: int) -> None:
        """Waits for the save under way and raises RunStopped, if the run is asked to end."""
        if self._stop.number is not None:
            self.settle()
            raise RunStopped(self._stop.number, step)

    def last_state(self) -> State | None:
        """Returns the state of the last save; None if there is none.

        Raises:
            OSError: a file is missing or damaged.
        """
        return read_state(self.path)

    def best_state(self) -> State | None:
        """Returns the state of the best evaluation; None if there is none."""
        return read_state(self.best_path)

    def load_last_tables(self, names: Collection[str]) -> None:
        """Gives the run's tables the rows of the last save.

        Args:
            names: of the tables. A save on servers has those of other programs too, which stay as they are.

        Raises:
            OSError: a file is missing or damaged.
        """
        self._load_tables(self.path, names)

    def load_best_tables(self, names: Collection[str]) -> None:
        """Gives the run's tables the rows of the best evaluation; as `load_last_tables`."""
        self._load_tables(self.best_path, names)

    def keep_best(self) -> None:
        """Copies the last save to `best`, if the run ended before it did; for a save of the best evaluation."""
        mirror_checkpoint(self.path, self.best_path)

    def _load_tables(self, path: Path, names: Collection[str]) -> None:
        with as_os_error("the run cannot go on"):
            checkpoint.load(path, tables=names, progress=False)

    def remove_unneeded(self) -> None:
        """Removes the files of snapshots that are gone."""
        with _opened(self.path) as directory:
            needed = {snapshot["metadata"]["dense"] for snapshot in snapshots_of(directory)}
            for name in directory.names():
                if _DENSE_NAME.fullmatch(name) and name not in needed:
                    directory.remove_file(name)


def _opened(path: Path) -> Directory:
    """Opens a directory of checkpoints within its run's; raises OSError if it is a link, or not found."""
    with Directory(path.parent) as run:
        return run.subdirectory(path.name)


def _snapshots(path: Path) -> list[dict[str, Any]]:
    """The snapshots of a checkpoint directory, the newest last; empty if no save has ended yet."""
    try:
        with _opened(path) as directory:
            return snapshots_of(directory)
    except FileNotFoundError:
        return []


def write_state(path: Path, state: State) -> None:
    """Writes a state to a new file, and waits until it is on disk.

    Raises:
        OSError: it cannot be written.
    """
    content = io.BytesIO()
    torch.save(state, content)
    try:
        with Directory(path.parent.parent) as run, run.create_subdirectory(path.parent.name) as directory:
            file = directory.create_new(path.name)
        with file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"the run could not be saved: {path}: {error.strerror}") from error


def saved_tables(path: Path) -> tuple[str, ...]:
    """Returns the names of the tables in the newest snapshot of a checkpoint directory; empty without a snapshot.

    Raises:
        OSError: the manifest is damaged.
    """
    snapshots = _snapshots(path)
    return tuple(str(table["name"]) for table in snapshots[-1]["tables"]) if snapshots else ()


def read_state(path: Path) -> State | None:
    """Returns the state besides tables in the newest snapshot of a checkpoint directory; None without a snapshot.

    Raises:
        OSError: a file is missing or damaged.
    """
    snapshots = _snapshots(path)
    if not snapshots:
        return None
    file = path / str((snapshots[-1]["metadata"] or {}).get("dense"))
    try:
        with _opened(path) as directory, directory.open(file.name) as content:
            return torch.load(content, weights_only=True)
    except FileNotFoundError:
        raise OSError(f"{path} is not of a training run, or is damaged: there is no file {file.name}") from None
    except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise OSError(f"{file} is damaged: {error}") from error


@contextmanager
def as_os_error(what: str) -> Iterator[None]:
    """Raises the block's errors as OSError, in one sentence as the command line prints it."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"{what}: {error}") from error


class ShardedRunCheckpoints(RunCheckpoints):
    """Saves a run together with the other processes, and restores its saves in any number of them.

    All processes call each method except `keep_best` together.

    Args:
        path: the run's directory, which all processes see.
        run: the records of the run, in the first process; None in the others.
        options, stop: as in `RunCheckpoints`.
        job: the processes.
    """

    def __init__(self, path: Path, run: RunDirectory | None, options: SaveOptions, stop: StopRequest, job: Job) -> None:
        super().__init__(path, run, options, stop)
        self._job = job

    def save(self, state: State, *, is_best: bool) -> None:
        """Saves the tables of all processes as they are now, and the first process's `state` with them.

        Raises:
            OSError: a process could not write.
        """
        assert self._job.group is not None, "of several processes"
        name = self._job.told_by_first(f"{DENSE}{secrets.token_hex(8)}.pt")
        error = self._write(name, state, is_best) if self._run is not None else None
        # All processes learn of it here: the save below is collective, and would wait for the first one.
        error = self._job.told_by_first(error)
        if error is not None:
            raise OSError(error)
        metadata = {"dense": name, "step": state["step"], "epoch": state["epoch"]}
        with as_os_error("the run could not be saved"):
            sharding.save(self.path, self._job.group, keep=self._options.keep, metadata=metadata)
        if self._job.is_first:
            self.remove_unneeded()
            if is_best:
                mirror_checkpoint(self.path, self.best_path)
        self._job.told_by_first(None)  # Nobody goes on before all is in its place.

    def _write(self, name: str, state: State, is_best: bool) -> str | None:
        """Writes the state besides tables; returns the error, if any."""
        assert self._run is not None, "in the first process"
        try:
            write_state(
                self.path / name, {**state, "is_best": is_best, "recorded": self._run.state_dict(with_scores=is_best)}
            )
        except OSError as error:
            return str(error)
        return None

    def _load_tables(self, path: Path, names: Collection[str]) -> None:
        # Sharded tables lie in these processes, which have no others.
        assert self._job.group is not None, "of several processes"
        with as_os_error("the run cannot go on"):
            sharding.load(path, self._job.group)
