"""A bundle that follows a publication."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import TreeSpec

from recstore_ops.serving.bundle import Bundle
from recstore_ops.serving.following.publication import Base, Current, Update, update_name
from recstore_ops.serving.following.sides import Sides
from recstore_ops.serving.following.sources import Source
from recstore_ops.serving.frozen_table import FrozenMemory, FrozenTable
from recstore_ops.serving.graph import Run
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.manifest import Manifest
from recstore_ops.serving.opening import BundleFiles

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_log = logging.getLogger("recstore_ops.follow")
_WAIT, _PAUSE = 1.0, 0.2
"""Seconds that a follower waits for news at a time, and after a failure."""


class Follower:
    """Keeps a model as new as a publication.

    Attributes:
        update: the last update that those who read see.
        problem: why what is newer could not be taken, if it could not.

    Args:
        manifest: of the model that is expected: its inputs, outputs and tables.
        source: of the publication.
        memory: of tables, see `FrozenTable`.
        operators: what the graph of a base may call.

    Raises:
        ValueError: there is no publication, or it is of another model.
        OSError: a file cannot be read, or is damaged.
    """

    def __init__(self, manifest: Manifest, source: Source, memory: FrozenMemory, operators: Operators) -> None:
        self.problem: Exception | None = None
        self._expected, self._source = manifest, source
        self._memory: FrozenMemory = memory
        self._operators = operators
        self._current: Current | None = None
        self._base: Base | None = None
        self._follow(source.wait(None, _WAIT))
        self._ended, self._taking = threading.Event(), threading.Lock()
        thread = threading.Thread(target=_keep_up, args=(weakref.ref(self), self._ended), name="recstore-follow")
        thread.daemon = True
        thread.start()

    @property
    def in_spec(self) -> TreeSpec:
        """How the inputs lie in the arguments of a call."""
        return self._sides.in_spec

    @property
    def out_spec(self) -> TreeSpec:
        """How the outputs lie in what a call gives."""
        return self._sides.out_spec

    @property
    def tables(self) -> dict[str, FrozenTable]:
        """The tables that those who read see now."""
        return self._sides.front.tables

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the outputs, flat, of inputs, flat; all of one step."""
        with self._sides.read() as side:
            return side.run(inputs)

    @contextmanager
    def unchanged(self) -> Iterator[Run]:
        """Gives what runs the model of one step. Others see at most one update meanwhile."""
        with self._sides.read() as side:
            yield side.run

    def end(self) -> None:
        """Follows no longer: the model stays as it is, once an update that is being taken is there."""
        with self._taking:
            self._ended.set()

    def look(self, timeout: float, ended: threading.Event | None = None) -> None:
        """Waits for news and takes them, unless it has `ended` meanwhile.

        What fails is noted, and tried again by the next call.
        """
        try:
            current = self._source.wait(self._current and self._current.tag, timeout)
            with self._taking:
                if current != self._current and not (ended and ended.is_set()):
                    self._follow(current)
        except (OSError, ValueError, RuntimeError) as error:
            if str(error) != str(self.problem):
                _log.warning("%r is not followed at the moment: %s", self._source, error)
            self.problem = error
        else:
            self.problem = None

    def _follow(self, current: Current) -> None:
        if self._base is None or not _continues(current, self._base.history, self.update.number):
            self._begin(current)
        else:
            try:
                self._take(range(self.update.number + 1, current.update + 1), current.base.history)
            except FileNotFoundError:  # It was away so long that updates are gone.
                self._begin(current)
        self._current = current

    def _begin(self, current: Current) -> None:
        """Begins anew with the publication's base."""
        base, history = current.base, current.base.history
        with self._source.base(base) as path:
            files = BundleFiles(path)
            self._check(files.manifest)
            sides = Sides(files, self._memory, self._operators)
        updates = self._read(range(base.after + 1, current.update + 1), history)
        sides.take(updates)
        self._sides, self.update, self._base = sides, updates[-1], base

    def _take(self, numbers: range, history: str) -> None:
        updates = self._read(numbers, history)
        if not updates:
            return
        try:
            self._sides.take(updates)
        except BaseException:
            self._base = None  # One of the copies has a part of it.
            raise
        self.update = updates[-1]

    def _read(self, numbers: range, history: str) -> list[Update]:
        return [self._source.update(update_name(history, number)) for number in numbers]

    def _check(self, manifest: Manifest) -> None:
        """Checks that the publication is of the model that is expected."""
        for what in ("inputs", "outputs"):
            expected, found = getattr(self._expected, what), getattr(manifest, what)
            if expected != found:
                raise ValueError(f"{self._source!r} is of another model: expected {what} {expected}, got {found}")
        expected, found = ([table.name for table in each.tables] for each in (self._expected, manifest))
        if set(expected) != set(found):
            raise ValueError(f"{self._source!r} is of another model: expected tables {expected}, got {found}")


def _continues(current: Current, history: str, update: int) -> bool:
    return current.base.history == history and update <= current.update


def _keep_up(follower: weakref.ref[Follower], ended: threading.Event) -> None:
    while not ended.is_set():
        own = follower()
        if own is None:
            return
        own.look(_WAIT, ended)
        failed = own.problem is not None
        del own
        if failed:
            ended.wait(_PAUSE)


class FollowingBundle(Bundle):
    """A bundle whose tables and dense tensors follow a publication; made by `load_bundle`.

    A call sees the state of one step. It never waits for an update.

    Attributes:
        follower: what keeps it up.
    """

    __module__ = "recstore_ops"

    def __init__(self, files: BundleFiles, source: Source, memory: FrozenMemory, operators: Operators) -> None:
        follower = Follower(files.manifest, source, memory, operators)
        super().__init__(files, follower)
        self.follower = follower

    @property
    def step(self) -> int:
        """The step of the trainer whose state is seen."""
        return self.follower.update.step

    @property
    def age(self) -> float:
        """Seconds since the trainer cut the last update that is seen, by the clocks of both machines."""
        return max(0.0, time.time() - self.follower.update.time)

    def program(self) -> ExportedProgram:
        """Raises:
        ValueError: the program would be of one moment.
        """
        raise ValueError(f"{self.path} follows a publication: open it without follow= for its program")

    def close(self) -> None:
        """Follows no longer; it goes on to answer from the last state that it saw."""
        self.follower.end()
