"""What a follower costs its leader, and how far it is behind.

Leader, follower and the client that pushes are processes of this machine and share its cores.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import torch

from benches import ids
from benches.cells.checkpoint import bench_directory
from benches.cells.servers import ServedTable, ServerProcess, seconds_of, served
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.measured import Figure
from benches.scale import Scale

CELL = "replicas"

_ROWS, _DIM = 20_000, 64
_ROUNDS = 60
_PACED_SECONDS = 15.0
_LOOK = 0.005


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, f"pushes of {_ROWS:,} rows of {_DIM} with followers", 1, lambda: _figures(scale))]


def _figures(scale: Scale) -> Iterator[Figure]:
    rows, rounds = scale.of(_ROWS), _ROUNDS if scale.is_full else 1
    ids_N, grad_ND = ids.ids_of(torch.randperm(rows)), gradients(rows, _DIM)
    with bench_directory("replicas-") as folder, ExitStack() as running:
        alone, followed, in_step = (
            running.enter_context(_logged(folder / name)) for name in ("alone", "followed", "in_step")
        )
        follower = running.enter_context(_logged(folder / "second", "--follow", followed.address))
        running.enter_context(_logged(folder / "third", "--follow", in_step.address, "--synchronous"))
        tables = [ServedTable(server.address, ids_N) for server in (alone, followed, in_step)]
        for leader in (followed, in_step):
            _wait_until_followed(leader)
        pushes = seconds_of(rounds, [lambda t=table: t.push(ids_N, grad_ND) for table in tables])
        seconds = _PACED_SECONDS if scale.is_full else 0.2
        lags = _lags(followed, follower, lambda: tables[1].push(ids_N, grad_ND), 2 * pushes[0], seconds)
    yield Figure(CELL, "push with a follower, speed over that without", pushes[0] / pushes[1], "x", ">= 0.85")
    yield Figure(CELL, "push with a synchronous follower, speed over that without", pushes[0] / pushes[2], "x")
    yield Figure(CELL, "follower behind at half the pushes, 99th percentile", 1e3 * lags, "ms", "<= 100")


@contextmanager
def _logged(data: Path, *options: str) -> Iterator[ServerProcess]:
    with served("--durability", "wal", "--data", str(data), "--metrics-port", "0", *options) as server:
        yield server


def _figure(server: ServerProcess, name: str) -> float | None:
    assert server.metrics is not None
    with urlopen(server.metrics, timeout=10) as answer:
        found = re.search(rf"^{name}{{.*}} (\S+)$", answer.read().decode(), re.MULTILINE)
    return None if found is None else float(found[1])


def _wait_until_followed(leader: ServerProcess) -> None:
    while _figure(leader, "recstore_follower_lag_changes") != 0:
        time.sleep(0.05)


def _lags(
    leader: ServerProcess, follower: ServerProcess, push: Callable[[], object], period: float, seconds: float
) -> float:
    """Pushes once a period; the 99th percentile of the time from an answer until the follower has the change."""
    first = _figure(leader, "recstore_log_last_change")
    assert first is not None
    answered: list[float] = []
    behind: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        seen = 0
        while not (is_over.is_set() and seen == len(answered)):
            time.sleep(_LOOK)
            there = int((_figure(follower, "recstore_log_last_change") or first) - first)
            now = time.perf_counter()
            behind.extend(max(0.0, now - at) for at in answered[seen:there])
            seen = max(seen, there)

    watcher = threading.Thread(target=watch)
    watcher.start()
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        push()
        answered.append(time.perf_counter())
        time.sleep(max(0.0, period - (time.perf_counter() - start)))
    is_over.set()
    watcher.join()
    behind.sort()
    return behind[int(0.99 * (len(behind) - 1))]
