"""Sums up what went on since the last record."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stretch:
    """Rows, losses and time since the last record."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.restart()

    def restart(self) -> None:
        """Begins anew."""
        self.rows = 0
        self.loss_sum = 0.0
        self._started = self._now()

    def add(self, rows: int, loss_sum: float) -> None:
        """Takes a step's rows and the sum of their losses."""
        self.rows += rows
        self.loss_sum += loss_sum

    @property
    def seconds(self) -> float:
        """Seconds since the beginning, at least a nanosecond."""
        return max(self._now() - self._started, 1e-9)

    @property
    def loss(self) -> float:
        """The mean loss of its rows."""
        return self.loss_sum / self.rows
