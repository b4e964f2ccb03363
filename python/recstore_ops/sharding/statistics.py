"""Counters of the exchanges of this process: the bytes that they sent, and the time it waited for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Lock


@dataclass
class ExchangeStatistics:
    """Counters of exchanges with other ranks. Ids, rows and gradients that stay on a rank do not count.

    Attributes:
        exchanges: batches that were exchanged.
        count_bytes: of the numbers that go with ids, of room for ids that was left over, and of flags.
        id_bytes: of ids.
        row_bytes: of rows.
        gradient_bytes: of gradients.
        exposed_seconds: that the caller waited for exchanges, reading of the rows asked for by others included.
        hidden_seconds: that a `ShardedPipeline` spent on exchanges while the caller did something else.
    """

    exchanges: int = 0
    count_bytes: int = 0
    id_bytes: int = 0
    row_bytes: int = 0
    gradient_bytes: int = 0
    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0


_statistics = ExchangeStatistics()
_lock = Lock()


def exchange_statistics(reset: bool = False) -> dict[str, float]:
    """The counters so far, by the names of `ExchangeStatistics`; begins anew with `reset`."""
    global _statistics
    with _lock:
        found = asdict(_statistics)
        if reset:
            _statistics = ExchangeStatistics()
    return found


def count(**amounts: float) -> None:
    """Adds to the statistics, by name."""
    with _lock:
        for name, amount in amounts.items():
            setattr(_statistics, name, getattr(_statistics, name) + amount)


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Adds the seconds spent within to `exposed_seconds` or `hidden_seconds`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        count(**{name: time.perf_counter() - started})
