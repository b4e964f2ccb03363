"""The time of a run by phase, and the memory of the process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.table import Table
from torch import nn

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_bytes() -> int:
    """Returns the bytes of resident memory, as Linux counts them."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


class Window:
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


OTHER = "other"
"""The name for the time outside all phases."""


class Phases:
    """Seconds of a run by phase. A phase within another one has its time for itself.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[str, float] = {}
        self._entered: list[str] = [OTHER]
        self._since = now()

    def begin(self) -> None:
        """Counts the time from now on."""
        self._since = self._now()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts the time within the block for the phase."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Begins a phase within the one that is under way."""
        self._take_time()
        self._entered.append(name)

    def leave(self) -> None:
        """Ends the phase that was entered last."""
        self._take_time()
        self._entered.pop()

    def watch_lookups(self, tables: Iterator[nn.Module]) -> None:
        """Counts the calls of these modules within the phase `forward` as the phase `lookup`."""
        for table in tables:
            table.register_forward_pre_hook(lambda *_: self._enter_lookup())
            table.register_forward_hook(lambda *_: self.leave(), always_call=True)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase so far, in the order in which they first ended."""
        self._take_time()
        return dict(self._seconds)

    def table(self) -> Table:
        """Returns a line a phase: its seconds and its part of all."""
        seconds = self.seconds()
        total = max(sum(seconds.values()), 1e-9)
        table = Table(title="time by phase", title_justify="left", box=None, pad_edge=False)
        table.add_column("phase")
        for name in ("seconds", "share"):
            table.add_column(name, justify="right")
        for name, own in sorted(seconds.items(), key=lambda phase: -phase[1]):
            table.add_row(name, f"{own:.3f}", f"{own / total:.1%}")
        return table

    def _enter_lookup(self) -> None:
        current = self._entered[-1]
        self.enter("lookup" if current == "forward" else current)

    def _take_time(self) -> None:
        now = self._now()
        current = self._entered[-1]
        self._seconds[current] = self._seconds.get(current, 0.0) + now - self._since
        self._since = now
