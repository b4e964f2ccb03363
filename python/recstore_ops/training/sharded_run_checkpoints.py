"""Checkpoints of a run whose tables are sharded over processes; the first of them writes what is not in tables."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path

from recstore_ops import sharding
from recstore_ops.training.job import Job
from recstore_ops.training.mirrored_directory import mirror_checkpoint
from recstore_ops.training.report.run_directory import RunDirectory
from recstore_ops.training.run_checkpoints import DENSE, RunCheckpoints, SaveOptions, State, as_os_error, write_state
from recstore_ops.training.stop_request import StopRequest


class ShardedRunCheckpoints(RunCheckpoints):
    """Saves a run together with the other processes and gives back what was saved, to any number of them.

    All processes call each method but `keep_best` together.

    Args:
        path: the run's directory, which all processes see.
        run: what the first process writes there; None in the others.
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
        """Writes what is not in tables; returns what was in the way."""
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
