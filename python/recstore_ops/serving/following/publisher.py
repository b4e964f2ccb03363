"""The publisher of a model in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType

from recstore_ops.serving.following.publication_copy import PublicationCopy


class Publisher(ABC):
    """Publishes the changes of a model to its followers, whole steps at a time; made by `publish`.

    If the tables are sharded over processes, each process has a publisher, and all call its `step`, `update` and
    `close` together.

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
        """Waits until the last update is written, and copied if there is a copy.

        If the tables are sharded over processes, only the first one waits. The others return at once.

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
        """The number of the last update that is known to be written. A new publisher continues the numbering."""

    @property
    @abstractmethod
    def bytes_written(self) -> int:
        """The bytes of all updates."""

    @property
    @abstractmethod
    def address(self) -> str | None:
        """`host:port` at which followers reach the publication."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends without the other processes, which may not come any more. Closes if there are none."""

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
