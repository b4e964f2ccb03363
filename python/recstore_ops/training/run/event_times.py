"""The age of a run's steps by the event times of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recstore_ops.client.client import evict
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.run.build import tables_of
from recstore_ops.training.run.config import TrainingConfig

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
    """Finds the last step whose rows are too old, by the newest event time of all rows up to each step.

    Steps whose newest times lie within a thousandth of the time to live are one stretch. A stretch is old when all of
    its steps are. So rows stay at most that much too long, and there are never more than about a thousand stretches.

    Args:
        ttl: the greatest age that is not too old, in the unit of the times.
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
    """Returns the state of a run of so many steps for a run that continues it: its steps are up to 0."""
    if state is None:
        return None
    return {"stretches": [(step - steps, newest, began) for step, newest, began in state["stretches"]]}


_MICROSECONDS = 1_000_000
_DEFAULT_INTERVAL = 1000


class TimeToLive:
    """Evicts rows of tables whose last update is too old.

    Args:
        seconds: the time to live; None evicts no rows.
        interval: steps between two evictions.
        tables: the names of tables whose `eviction` notes when rows are updated.
        evict: evicts the rows of a table that no step has updated for more than so many steps.
    """

    def __init__(
        self, seconds: float | None, interval: int, tables: Sequence[str], evict: Callable[[str, int], object]
    ) -> None:
        self._times = None if seconds is None else EventTimes(max(1, round(seconds * _MICROSECONDS)))
        self._interval = interval
        self._tables = tuple(tables)
        self._evict = evict

    @classmethod
    def of(cls, config: TrainingConfig, model: nn.Module) -> TimeToLive:
        """Returns the one that is configured for a model's tables; each process of several evicts its own rows."""
        tables = [table.name for table in tables_of(model)] if config.ttl_time is not None else []
        return cls(config.ttl_time, config.eviction_interval or _DEFAULT_INTERVAL, tables, _evict)

    def after_step(self, step: int, batch: Batch) -> None:
        """Takes the rows of a step, and evicts rows of tables when that is due.

        Raises:
            ValueError: the rows have no event times.
        """
        if self._times is None:
            return
        if batch.times is None:
            raise ValueError("ttl_time needs the event times of rows, and these have none")
        self._times.add(step, int(batch.times.max()))
        old = self._times.last_old_step() if step % self._interval == 0 else None
        if old is not None:
            for table in self._tables:
                # A row that was updated in the next step stays.
                self._evict(table, step - old - 1)

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the event times of steps so far; None if rows are not evicted by them."""
        return None if self._times is None else self._times.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Resumes from a result of `state_dict`; None begins anew."""
        if self._times is not None and state is not None:
            self._times.load_state_dict(state)


def _evict(table: str, ttl: int) -> None:
    # A client would open the table as one of this process alone.
    evict(table, dry_run=False, ttl=ttl)
