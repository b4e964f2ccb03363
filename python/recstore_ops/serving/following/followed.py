"""A bundle that follows a publication."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import TreeSpec

from recstore_ops.serving.bundle import Bundle
from recstore_ops.serving.following.double_buffer import DoubleBuffer
from recstore_ops.serving.following.names import CURRENT
from recstore_ops.serving.following.publication import Current
from recstore_ops.serving.following.sources import Source
from recstore_ops.serving.following.update import MAX_HEADER_BYTES, MAX_ROW_BYTES, Update, update_name
from recstore_ops.serving.frozen_table import FrozenMemory, FrozenTable
from recstore_ops.serving.graph import Run
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.manifest import Manifest
from recstore_ops.serving.opening import BundleFiles

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_log = logging.getLogger("recstore_ops.follow")

_WAIT = 1.0
"""Seconds that a follower waits for news at a time."""

_PAUSE, _LONGEST_PAUSE = 0.2, 2.0
"""Seconds after a failure, and after many."""

_SILENCE = 60.0
"""Seconds without an answer after which it counts as a problem that there is none yet."""

_BATCH_BYTES = 64 << 20
"""The most bytes of updates that are read before they are applied, unless one update is larger."""

_HISTORIES = 1000
"""The most ended histories that a follower remembers."""


class Follower:
    """Keeps a model as new as a publication.

    Attributes:
        update: the last update that readers see, without its content.

    Args:
        manifest: the manifest of the expected model: its inputs, outputs and tables.
        source: of the publication.
        memory: of tables, see `FrozenTable`.
        operators: what the graph of a base may call.

    Raises:
        ValueError: there is no publication, or it publishes another model.
        OSError: a file cannot be read, or is damaged.
    """

    update: Update

    def __init__(self, manifest: Manifest, source: Source, memory: FrozenMemory, operators: Operators) -> None:
        self._expected, self._source = manifest, source
        self._memory: FrozenMemory = memory
        self._operators = operators
        self._current: Current | None = None
        self._sides: DoubleBuffer | None = None
        self._is_whole = False
        self._left: deque[str] = deque(maxlen=_HISTORIES)
        self._failed: OSError | ValueError | None = None
        self._news: tuple[Current | None, float] = None, 0.0
        self._seen_at = 0.0
        self._ended, self._ending = threading.Event(), threading.Lock()
        self._follow(source.wait(None, _WAIT))

    def start(self) -> None:
        """Follows in a thread, until `end`, or until nothing refers to this any more."""
        arguments = (weakref.ref(self), self._ended)
        threading.Thread(target=_keep_up, args=arguments, name="recstore-follow", daemon=True).start()

    @property
    def sides(self) -> DoubleBuffer:
        """Both copies of the model."""
        assert self._sides is not None, "the constructor opens a base or raises"
        return self._sides

    @property
    def in_spec(self) -> TreeSpec:
        """How the inputs lie in the arguments of a call."""
        return self.sides.in_spec

    @property
    def out_spec(self) -> TreeSpec:
        """How the outputs lie in what a call gives."""
        return self.sides.out_spec

    @property
    def tables(self) -> dict[str, FrozenTable]:
        """The tables that readers see now."""
        return self.sides.front.tables

    @property
    def problem(self) -> OSError | ValueError | None:
        """Why what is newer could not be taken, if it could not."""
        silence = self._source.silence
        if self._failed is None and silence > _SILENCE and not self._ended.is_set():
            return OSError(f"{self._source!r} has not answered for {silence:.0f} s")
        return self._failed

    @property
    def follows(self) -> bool:
        """Whether the publication can be read."""
        return not self._ended.is_set() and self.problem is None

    @property
    def age(self) -> float:
        """Seconds since the trainer cut the last update that is seen; see `FollowingBundle.age`."""
        return max(time.time() - self.update.time, time.monotonic() - self._seen_at)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the outputs, flat, of inputs, flat; all of one step."""
        with self.sides.read() as side:
            return side.run(inputs)

    @contextmanager
    def unchanged(self) -> Iterator[Run]:
        """Gives what runs the model of one step. PeerRanks see at most one update meanwhile."""
        with self.sides.read() as side:
            yield side.run

    def end(self) -> None:
        """Follows no longer: from here on the model stays as it is. It does not wait for what is being read."""
        with self._ending:
            self._ended.set()
        self.sides.wake()
        self._source.close()

    def look(self, timeout: float) -> None:
        """Waits for news and takes them.

        Any failure is noted as the problem, and the next call tries again.
        """
        try:
            current = self._source.wait(self._current and self._current.tag, timeout)
            if current != self._current:
                self._follow(current)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A panic of native code is no Exception.
            self._note(error)
        else:
            self._failed = None

    def _note(self, error: BaseException) -> None:
        """Makes an error the problem, and logs it if it is another than before."""
        if self._ended.is_set():
            return
        is_expected = isinstance(error, (OSError, ValueError))
        problem = error if is_expected else OSError(f"{self._source!r} cannot be followed: {error!r}")
        if str(problem) != str(self._failed):
            trace = None if is_expected else error
            _log.warning("%r is not followed at the moment: %s", self._source, problem, exc_info=trace)
        self._failed = problem

    def _follow(self, current: Current) -> None:
        if current != self._news[0]:
            self._news = current, time.monotonic()
        self._check_order(current)
        if not self._is_whole or current.base.history != self.update.history:
            self._begin(current)
        else:
            try:
                self._take(self.sides, current, self.update.number)
            except FileNotFoundError:  # It was away so long that updates are gone.
                self._begin(current)
        self._current = current

    def _check_order(self, current: Current) -> None:
        """Checks that the publication does not go back.

        Raises:
            ValueError: it has fewer updates of the history than were taken, or a history that ended.
        """
        if self._sides is None:
            return
        history, own = current.base.history, self.update
        if history == own.history and current.update < own.number:
            raise ValueError(
                f"{self._source!r}: {CURRENT} went back to update {current.update} of history {history}, after update "
                f"{own.number} was taken: the model stays as it is"
            )
        if history in self._left:
            raise ValueError(
                f"{self._source!r}: {CURRENT} went back to history {history}, after history {own.history} began: the "
                "model stays as it is"
            )

    def _begin(self, current: Current) -> None:
        """Begins anew with the publication's base."""
        with self._source.base(current.base) as directory:
            files = BundleFiles(directory)
            self._check(files.manifest)
            sides = DoubleBuffer(files, self._memory, self._operators, self._ended)
        self._take(sides, current, current.base.after)

    def _take(self, sides: DoubleBuffer, current: Current, after: int) -> None:
        """Takes the updates after one, as far as the publication goes."""
        for updates in self._batches(sides, range(after + 1, current.update + 1), current.base.history):
            self._is_whole = False  # If it fails, one of the copies has a part of it.
            is_taken = sides.take(updates)
            with self._ending:
                # Under the lock of `end`: when that has returned, nothing newer is shown.
                if not is_taken or self._ended.is_set():
                    return
                # A base has rows of several steps until this update, and no reader may see it before.
                if updates[-1].number >= current.base.until:
                    self._show(sides, updates[-1])

    def _show(self, sides: DoubleBuffer, update: Update) -> None:
        """Lets readers see an update, the last one of copies of the model."""
        if self._sides is not None and update.history != self.update.history:
            self._left.append(self.update.history)
        # Without its content, which may be a gigabyte of rows.
        self._seen_at, self.update = self._news[1], update.without_content()
        self._sides, self._is_whole = sides, True

    def _batches(self, sides: DoubleBuffer, numbers: range, history: str) -> Iterator[list[Update]]:
        """Yields updates, as many at a time as lie in memory at once."""
        batch: list[Update] = []
        for number in numbers:
            # No publisher writes a larger update, so a longer file is refused before it is read.
            most = MAX_ROW_BYTES + MAX_HEADER_BYTES + sides.state_bytes
            batch.append(self._source.update(update_name(history, number), most))
            if sum(update.size for update in batch) >= _BATCH_BYTES:
                yield batch
                batch = []
        if batch:
            yield batch

    def _check(self, manifest: Manifest) -> None:
        """Checks that the publication has the inputs, outputs and tables of the expected model."""
        for what in ("inputs", "outputs"):
            expected, found = getattr(self._expected, what), getattr(manifest, what)
            if expected != found:
                raise ValueError(f"{self._source!r} is of another model: expected {what} {expected}, got {found}")
        expected, found = ([table.name for table in each.tables] for each in (self._expected, manifest))
        if set(expected) != set(found):
            raise ValueError(f"{self._source!r} is of another model: expected tables {expected}, got {found}")


def _keep_up(follower: weakref.ref[Follower], ended: threading.Event) -> None:
    failures = 0
    while not ended.is_set():
        own = follower()
        if own is None:
            return
        own.look(_WAIT)
        failures = 0 if own.problem is None else failures + 1
        # A reference kept over the pause would keep a model alive that nothing else uses.
        del own
        if failures:
            ended.wait(min(_PAUSE * failures, _LONGEST_PAUSE))


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
        follower.start()

    @property
    def step(self) -> int:
        """The step of the trainer whose state is seen."""
        return self.follower.update.step

    @property
    def age(self) -> float:
        """Seconds since the trainer cut the last update that is seen, by the clocks of both machines, and at least the
        seconds since this process saw that update first, by its own clock."""
        return self.follower.age

    def program(self) -> ExportedProgram:
        """Raises:
        ValueError: always, since a program would keep the state of one moment.
        """
        raise ValueError(f"{self.path} follows a publication: open it without follow= for its program")

    def close(self) -> None:
        """Stops following at once. The model still answers, from the last state that it saw."""
        self.follower.end()
