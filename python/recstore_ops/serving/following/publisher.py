"""What publishes a model while it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType

from recstore_ops.serving.following.publication_copy import PublicationCopy


class Publisher(ABC):
    """Tells those who follow a model what changed in it, whole steps at a time; made by `publish`.

    Where the tables are sharded over processes, each has one, and all call `step`, `update` and `close` of theirs
    together.

    Attributes:
        directory: of the publication.
        problem: why the last update, or the last base, could not be written, if it could not. What the update had comes
            with the next one. The first process knows.
        copy: in an object store, if there is one; the first process has it.
        steps: how many were counted.
    """

    __module__ = "recstore_ops"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problem: Exception | None = None
        self.copy: PublicationCopy | None = None
        self.steps = 0

    def step(self) -> None:
        """Counts a step; publishes what changed if the last update is `interval` seconds old.

        Raises:
            RuntimeError: a row has a value that its encoding has no number for; servers do not answer, or another
                program publishes their tables now; or another process of sharded tables failed.
            ValueError: the publisher is closed.
        """
        self.steps += 1
        if self.steps >= self._due():
            self._look()

    @abstractmethod
    def update(self) -> bool:
        """Publishes what changed since the last update, as it is now; False: nothing did.

        It waits until the update before is written.

        Raises:
            RuntimeError, ValueError: as `step`.
        """

    @abstractmethod
    def flush(self) -> None:
        """Waits until the last update is written, and copied where there is a copy.

        Of the processes of sharded tables only the first one waits; the others return at once.

        Raises:
            OSError: it could not be.
        """

    @abstractmethod
    def close(self) -> None:
        """Publishes what changed, and ends.

        Raises:
            OSError: the last update could not be written.
            RuntimeError: the first process could not write it.
        """

    @property
    @abstractmethod
    def number(self) -> int:
        """Of the last update that is known to be written; the publication counts on where it ended."""

    @property
    @abstractmethod
    def bytes_written(self) -> int:
        """Of all updates."""

    @property
    @abstractmethod
    def address(self) -> str | None:
        """`host:port` at which followers reach the publication."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends without the other processes, which may not come any more. Where there are none, closes."""

    def _is_closed(self) -> ValueError:
        return ValueError(f"the publisher of {self.directory} is closed")

    @abstractmethod
    def _due(self) -> int:
        """The step after which it looks next."""

    @abstractmethod
    def _look(self) -> None:
        """Publishes what changed if it is time."""

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()
