"""How long a peer may take."""

from __future__ import annotations

import math
import time

BYTES_PER_SECOND = 64 << 10
"""The least that a peer must send or take of something long, on average."""


class TimeLimit:
    """The time that a peer has for what it sends or takes. No pause may be as long as the time that it begins with.

    Args:
        seconds: that it begins with.
        bytes_per_second: the time grows by a second for so many; none: it does not.
    """

    def __init__(self, seconds: float, bytes_per_second: float = math.inf) -> None:
        self._seconds, self._bytes_per_second = seconds, bytes_per_second
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Returns the seconds that the next pause may take.

        Raises:
            TimeoutError: there are none.
        """
        left = min(self._end - time.monotonic(), self._seconds)
        if left <= 0:
            raise TimeoutError("the peer is too slow")
        return left

    def went(self, count: int) -> None:
        """Notes bytes that were sent or taken."""
        self._end += count / self._bytes_per_second
