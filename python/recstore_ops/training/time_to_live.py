"""Rows of tables that leave by the event times of the rows of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from recstore_ops.client.client import evict
from recstore_ops.training.build import tables_of
from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.event_times import EventTimes
from recstore_ops.training.rows.batch import Batch

_MICROSECONDS = 1_000_000
_DEFAULT_INTERVAL = 1000


class TimeToLive:
    """Takes rows away from tables whose last update is too old.

    Args:
        seconds: how old is too old; None takes no rows away.
        interval: steps between two times that rows are taken away.
        tables: the names of tables whose `eviction` notes when rows are updated.
        evict: takes away the rows of a table that no step has updated for more than so many.
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
        """Returns the one that is configured for a model's tables; each process of several takes its own rows away."""
        tables = [table.name for table in tables_of(model)] if config.ttl_time is not None else []
        return cls(config.ttl_time, config.eviction_interval or _DEFAULT_INTERVAL, tables, _evict)

    def after_step(self, step: int, batch: Batch) -> None:
        """Takes the rows that a step was made with, and takes rows of tables away where that is due.

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
        """Returns the event times of steps so far; None where rows do not leave by them."""
        return None if self._times is None else self._times.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on from what `state_dict` returned; from None it begins anew."""
        if self._times is not None and state is not None:
            self._times.load_state_dict(state)


def _evict(table: str, ttl: int) -> None:
    # A client would open the table as one of this process alone.
    evict(table, dry_run=False, ttl=ttl)
