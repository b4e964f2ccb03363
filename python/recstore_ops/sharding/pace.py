"""Whether it pays to exchange ahead: both ways are measured in turn, and all ranks choose the same one.

A cycle begins with some batches exchanged ahead and as many that are not. The exchange of the next one, ahead again,
carries what each rank measured. The faster way then takes the rest of the cycle; cycles become longer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

_TRIED = 6
"""The batches of a trial, of each way. Those beside the other way do not count."""

_TOLD, _DECIDED = 2 * _TRIED, 2 * _TRIED + 2
"""The batch of a cycle whose exchange carries the measurements, and the first one after all ranks have them."""

_FIRST_CYCLE, _LONGEST_CYCLE = 64, 2048

_GAIN = 0.98
"""The part of the time of the plain way that the other one must stay below."""

_BITS = 31
_MOST = (1 << _BITS) - 1


class Pace:
    """Chooses for each batch, in order, whether it is exchanged ahead.

    Attributes:
        is_ahead: whether the rest of the cycle is; the same on all ranks, as all is that is chosen here.
    """

    def __init__(self) -> None:
        self.is_ahead = False
        self._place = -1
        self._cycle = _FIRST_CYCLE
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forgets batches that were begun and never given out."""
        self._begun: deque[bool] = deque()
        self._before: tuple[bool, float] | None = None

    @property
    def is_decided_now(self) -> bool:
        """Whether the batch that begins next is the first one after all ranks have all measurements."""
        return self._place + 1 == _DECIDED

    def begin(self) -> bool:
        """Whether the next batch is exchanged ahead."""
        self._place += 1
        if self._place == self._cycle:
            self._place, self._cycle = 0, min(2 * self._cycle, _LONGEST_CYCLE)
            self._times = {False: [], True: []}
        in_trial = self._place < _TRIED or self._place == _TOLD
        chosen = in_trial if self._place < _DECIDED else self.is_ahead
        self._begun.append(chosen)
        return chosen

    def finish(self) -> None:
        """Notes that the consumer is done with the next batch given out."""
        now, was_ahead = time.perf_counter(), self._begun.popleft()
        if self._before is not None and self._before[0] == was_ahead and list(self._begun)[:1] == [was_ahead]:
            self._times[was_ahead].append(now - self._before[1])
        self._before = was_ahead, now

    @property
    def note(self) -> int:
        """What this rank measured, for the others; 0 for nothing, and where they have it already."""
        if self._place != _TOLD or not all(self._times.values()):
            return 0
        ahead, plain = (min(_MOST, 1 + int(1e6 * median(self._times[way]))) for way in (True, False))
        return ahead << _BITS | plain

    def decide(self, notes: Sequence[int]) -> None:
        """Chooses the way of the rest of the cycle by what all ranks measured; where one has nothing it stays."""
        if all(notes):
            self.is_ahead = sum(note >> _BITS for note in notes) < _GAIN * sum(note & _MOST for note in notes)
