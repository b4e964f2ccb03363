"""Sums up what went on since the last record."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


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

    def leave_out(self, seconds: float) -> None:
        """Does not count the last `seconds`."""
        self._started += seconds

    def state_dict(self) -> dict[str, Any]:
        """Returns what was summed up so far."""
        return {"rows": self.rows, "loss_sum": self.loss_sum, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned, as if no time had passed since."""
        self.rows, self.loss_sum = state["rows"], state["loss_sum"]
        self._started = self._now() - state["seconds"]

    @property
    def seconds(self) -> float:
        """Seconds since the beginning, at least a nanosecond."""
        return max(self._now() - self._started, 1e-9)

    @property
    def loss(self) -> float:
        """The mean loss of its rows."""
        return self.loss_sum / self.rows
