"""Which steps of a run were how long ago by the event times of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_PARTS = 1000


@dataclass(frozen=True)
class _Stretch:
    """Steps that follow each other, with nearly one event time.

    Attributes:
        step: the last of them.
        newest: the newest event time up to that step.
        began: the newest one when they began.
    """

    step: int
    newest: int
    began: int


class EventTimes:
    """Says which step is the last one whose rows are too old, by the newest event time of all rows up to each step.

    Steps whose newest times lie within a thousandth of the time to live are one stretch, which is old when all of it
    is. So rows stay by at most that part too long, and there are never more than about a thousand stretches.

    Args:
        ttl: how old is too old; in the unit of the times.
    """

    def __init__(self, ttl: int) -> None:
        self._ttl = ttl
        self._resolution = -(-ttl // _PARTS)
        self._stretches: list[_Stretch] = []

    def add(self, step: int, time: int) -> None:
        """Takes the newest event time of a step's rows; steps come in order, times may go back."""
        last = self._stretches[-1] if self._stretches else None
        newest = time if last is None else max(time, last.newest)
        if last is not None and newest - last.began < self._resolution:
            self._stretches[-1] = _Stretch(step, newest, last.began)
        else:
            self._stretches.append(_Stretch(step, newest, newest))
        # Of those that are too old only the last one matters.
        while len(self._stretches) > 1 and self._is_old(self._stretches[1]):
            del self._stretches[0]

    def last_old_step(self) -> int | None:
        """Returns the last step up to which the newest event time was more than `ttl` before that of now."""
        first = self._stretches[0] if self._stretches else None
        return first.step if first is not None and self._is_old(first) else None

    def __len__(self) -> int:
        return len(self._stretches)

    def state_dict(self) -> dict[str, Any]:
        """Returns what is known of the steps so far."""
        return {"stretches": [(each.step, each.newest, each.began) for each in self._stretches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self._stretches = [_Stretch(*values) for values in state["stretches"]]

    def _is_old(self, stretch: _Stretch) -> bool:
        return self._stretches[-1].newest - stretch.newest > self._ttl


def times_before(state: dict[str, Any] | None, steps: int) -> dict[str, Any] | None:
    """Returns the state of a run of so many steps as one that begins where it ended has it: steps up to 0."""
    if state is None:
        return None
    return {"stretches": [(step - steps, newest, began) for step, newest, began in state["stretches"]]}
