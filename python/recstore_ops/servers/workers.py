"""Workers that train together on servers: how their steps go together, who is there, barriers.

A program becomes worker `n` with `set_ps_servers(..., worker=n)` and sends heartbeats from then on. The options of the
servers (`recstore serve --workers --consistency`) decide whether workers wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from recstore_ops.config.option import Option
from recstore_ops.servers import store


class Consistency(str, Enum):
    """How the updates of several workers go together.

    Attributes:
        ASYNCHRONOUS: each is made as it comes.
        SYNCHRONOUS: a step is made when every worker has sent its part, and is one step of the optimizer.
        BOUNDED: each is made as it comes, and who is too many steps ahead of another waits.
    """

    ASYNCHRONOUS = "asynchronous"
    SYNCHRONOUS = "synchronous"
    BOUNDED = "bounded"


class Combine(str, Enum):
    """How the gradients that workers send for one id in one step are combined: their sum, or the mean over workers."""

    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True)
class WorkerSync:
    """How a server lets workers train together; each is a key of `cache_ps` and an option of `recstore serve`.

    Attributes:
        workers: how many there are; needed if they wait for each other, and for barriers.
        consistency: how their updates go together.
        combine: how synchronous gradients of one id are combined.
        staleness: the steps that one may be ahead of another, if staleness is bounded.
        worker_timeout: seconds that a worker waits for others before its call fails and names them.
        heartbeat_timeout: seconds of silence after which a worker is taken for dead.

    Raises:
        ValueError: `combine` or `staleness` is given for a consistency that has none.
    """

    workers: Annotated[int | None, Option("How many workers train together.", least=1)] = None
    consistency: Annotated[
        Consistency, Option("`synchronous`: a step waits for all workers; `bounded`: none is far ahead of another.")
    ] = Consistency.ASYNCHRONOUS
    combine: Annotated[Combine, Option("How synchronous gradients of one id are combined: by sum or by mean.")] = (
        Combine.SUM
    )
    staleness: Annotated[int, Option("The steps that a worker may be ahead of another, if `bounded`.", least=0)] = 0
    worker_timeout: Annotated[
        float, Option("Seconds that a worker waits for others before its call fails.", least=0.001)
    ] = 60.0
    heartbeat_timeout: Annotated[
        float, Option("Seconds of silence after which a worker is taken for dead.", least=0.001)
    ] = 10.0

    def __post_init__(self) -> None:
        needed = {"combine": (Combine.SUM, Consistency.SYNCHRONOUS), "staleness": (0, Consistency.BOUNDED)}
        for name, (default, consistency) in needed.items():
            if getattr(self, name) != default and self.consistency is not consistency:
                raise ValueError(
                    f"{name} is for the consistency {consistency.value}, and this is {self.consistency.value}"
                )


@dataclass(frozen=True)
class WorkerState:
    """The state of a worker, as a server sees it.

    Attributes:
        worker: its number.
        steps: the steps that it has made, if staleness is bounded.
        silent_for: seconds since the server last heard from it.
    """

    worker: int
    steps: int
    silent_for: float


@dataclass(frozen=True)
class ShardWorkers:
    """The workers, as one server sees them.

    Attributes:
        workers: those that have joined and not left.
        most_ahead: the most steps that one was ahead of another when it made one, if staleness is bounded.
    """

    workers: tuple[WorkerState, ...]
    most_ahead: int


def ps_barrier(name: str, timeout: float = 60.0) -> None:
    """Waits until all workers have called this with the same name.

    Args:
        name: distinguishes this barrier from others.
        timeout: seconds to wait.

    Raises:
        RuntimeError: names the workers that have not come in time, or that are dead; tables are not on servers.
        ConnectionError: the server does not answer.
    """
    store.barrier(name, timeout)


def leave_ps_workers() -> None:
    """Says that this worker has finished: the others no longer wait for it.

    Raises:
        RuntimeError: tables are not on servers.
        ConnectionError: a server does not answer.
    """
    store.leave_workers()


def ps_workers() -> list[ShardWorkers]:
    """The workers as each server sees them, in the order of the shards.

    Raises:
        RuntimeError: tables are not on servers.
        ConnectionError: a server does not answer.
    """
    return [
        ShardWorkers(tuple(WorkerState(*state) for state in states), most_ahead)
        for states, most_ahead in store.workers()
    ]


__all__ = [
    "Combine",
    "Consistency",
    "ShardWorkers",
    "WorkerState",
    "WorkerSync",
    "leave_ps_workers",
    "ps_barrier",
    "ps_workers",
]
