"""Processes that are the ranks of a job, kept from test to test: each imports the package once.

What a rank is given to run is a function of a test module, called as `function(group, *arguments)`.
"""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from warm_processes import PROCESSES

from recstore_ops import get_kv_client, table_names

MAX_RANKS = 4
SECONDS = 120
"""No test waits longer for its ranks."""


class RankError(Exception):
    """An error of a rank: its type's name, and what it said."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.trace = trace


class Ranks:
    """Four processes, of which a test takes the first ones."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections
        self.is_broken = False

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each of `world` ranks; raises the first error of a rank."""
        outcomes = self.outcomes(world, function, *arguments)
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                raise AssertionError(outcome.trace)
        return outcomes

    def errors(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[RankError]:
        """The error that the function raises on each of `world` ranks."""
        outcomes = self.outcomes(world, function, *arguments)
        assert all(isinstance(outcome, RankError) for outcome in outcomes), outcomes
        return outcomes

    def outcomes(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each of `world` ranks returns or raises."""
        used = self._connections[:world]
        for connection in used:
            connection.send((function, world, arguments))
        return [self._answer(connection) for connection in used]

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(SECONDS):
            self.is_broken = True
            raise AssertionError(f"a rank did not answer within {SECONDS} seconds")
        answer = connection.recv()
        return RankError(*answer[1:]) if isinstance(answer, tuple) and answer[:1] == (_ERROR,) else answer


_ERROR = "an error of a rank"

groups: dict[int, dist.ProcessGroup] = {}
"""Within a rank: the groups of the first ranks, by how many they are."""

second_groups: dict[int, dist.ProcessGroup] = {}
"""The same ranks once more."""


@contextmanager
def started_ranks() -> Iterator[Ranks]:
    """Starts the processes, and ends them."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [PROCESSES.Pipe() for _ in range(MAX_RANKS)]
        processes = [
            PROCESSES.Process(target=_serve, args=(rank, Path(folder) / "store", child), daemon=True)
            for rank, (_, child) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        try:
            yield Ranks([parent for parent, _ in pairs])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(rank: int, store: Path, connection: Connection) -> None:
    """Runs what comes through the connection, as a rank."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MAX_RANKS, timeout=timeout)
    for world in range(1, MAX_RANKS + 1):
        for made in (groups, second_groups):
            made[world] = dist.new_group(range(world), timeout=timeout)  # type: ignore[assignment]
    with suppress(EOFError):
        while True:
            function, world, arguments = connection.recv()
            try:
                connection.send(function(groups[world], *arguments))
            except Exception as error:
                connection.send((_ERROR, type(error).__name__, str(error), traceback.format_exc()))
            for name in table_names():
                get_kv_client().drop(name)
    os._exit(0)
