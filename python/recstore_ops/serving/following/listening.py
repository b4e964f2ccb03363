"""For how long something that was asked has not answered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Listening:
    """Notes since when an answer is waited for."""

    def __init__(self) -> None:
        self._since: float | None = None

    @property
    def silence(self) -> float:
        """Seconds of waiting for an answer, or for its next part; 0 if no answer is awaited."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Waits for an answer meanwhile."""
        self.heard()
        try:
            yield
        finally:
            self._since = None

    def heard(self) -> None:
        """Notes a part of the answer."""
        self._since = time.monotonic()
