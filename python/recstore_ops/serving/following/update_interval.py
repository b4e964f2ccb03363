"""When the next update of a publication is due."""

from __future__ import annotations

import time

MAX_STEPS_OF_RANKS = 32
"""Between two looks of processes at the time, of which only the first one's counts."""


class UpdateInterval:
    """Schedules an update once the last one is `interval` seconds old; the time is checked after a number of steps.

    Args:
        interval: in seconds.
        most_steps: the most steps between two checks; fewer if so many would take longer than the time that is left.

    Attributes:
        due: the step after which the time is checked next.
    """

    def __init__(self, interval: float, most_steps: int = 1) -> None:
        self.due = 1
        self._interval, self._most_steps = interval, most_steps
        self._updated_at = self._looked_at = time.monotonic()
        self._steps = 0

    def is_time(self, steps: int) -> bool:
        """Looks whether an update is due after so many steps."""
        now, taken = time.monotonic(), steps - self._steps
        left = self._updated_at + self._interval - now
        if taken > 0:
            until_update = (self._interval if left <= 0 else left) * taken / max(now - self._looked_at, 1e-9)
            self.due = steps + min(max(1, round(until_update)), self._most_steps)
            self._looked_at, self._steps = now, steps
        return left <= 0

    def note_update(self) -> None:
        """Notes that there is one now."""
        self._updated_at = time.monotonic()
