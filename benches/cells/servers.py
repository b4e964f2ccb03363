"""Pulls and pushes on one server of this machine, beside a plain TCP loop that moves as many bytes.

The loop's peer does nothing with what it gets. Its answers go into fresh memory of torch's allocator, as a lookup's do.
Both processes of each share the machine's cores. The round trip of one row is measured with both on one core and with a
core each: to wake a process on another core takes many times as long, and which one is woken changes by chance.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benches import ids
from benches.cells.checkpoint import bench_directory
from benches.cells.stage import Stage
from benches.cells.step import gradients
from benches.competitors.recstore import emb_read, emb_update, emb_write, new_name
from benches.measured import Figure
from benches.scale import Scale
from benches.yardstick import Peer
from recstore_ops import DistEmbedding, set_ps_backend, set_ps_servers

CELL = "servers"

_ROWS, _DIM = 100_000, 64
_ROUNDS, _ONE_ROW_CALLS = 30, 500
_STARTED = re.compile(r"shard \d+ of \d+ at ([^\s,]+)(?:, metrics at (http\S+/metrics))?")


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, f"{_ROWS:,} rows of {_DIM} on a server", 1, lambda: _figures(scale))]


def _figures(scale: Scale) -> Iterator[Figure]:
    rows, rounds = scale.of(_ROWS), _ROUNDS if scale.is_full else 1
    ids_N, grad_ND = ids.ids_of(torch.randperm(rows)), gradients(rows, _DIM)
    sent_bytes = ids_N.nbytes + grad_ND.nbytes
    with (
        bench_directory("servers-") as logs,
        Peer(sent_bytes) as peer,
        served() as plain,
        served("--durability", "wal", "--data", str(logs)) as logged,
    ):
        tables = [ServedTable(server.address, ids_N) for server in (plain, logged)]
        # A vector that is as long as ids and gradients together: what a push sends.
        sent, nothing = torch.zeros(sent_bytes, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        pulls = seconds_of(
            rounds,
            [lambda: peer.round_trip(ids_N, torch.empty(rows, _DIM)), lambda: tables[0].pull(ids_N)],
        )
        pushes = seconds_of(
            rounds,
            [lambda: peer.round_trip(sent, nothing), *(lambda t=table: t.push(ids_N, grad_ND) for table in tables)],
        )
        written = seconds_of(rounds, [lambda: _write(logs / "plain", sent)])
        one = ids_N[:1].clone()
        calls = (lambda: peer.round_trip(one, torch.empty(1, _DIM)), lambda: tables[0].pull(one))
        singles = {}
        cores = sorted(os.sched_getaffinity(0))
        for where, core in zip(("both on one core", "a core each"), cores, strict=False):
            with _on_core(cores[0], [0]), _on_core(core, [*_threads(peer.pid), *_threads(plain.pid)]):
                singles[where] = seconds_of(rounds, [lambda c=call: _repeat(scale, c) for call in calls])
    yield Figure(CELL, "pull of 100,000 rows, speed over plain TCP", pulls[0] / pulls[1], "x", ">= 0.5")
    yield Figure(CELL, "push of 100,000 rows, speed over plain TCP", pushes[0] / pushes[1], "x", ">= 0.5")
    for where, (plain_one, own_one) in singles.items():
        yield Figure(CELL, f"round trip of one row over plain TCP, {where}", own_one / plain_one, "x", "<= 2.5")
    yield Figure(CELL, "push with a log, speed over that without", pushes[1] / pushes[2], "x", ">= 0.7")
    yield Figure(CELL, "pull of 100,000 rows", 1e3 * pulls[1], "ms")
    yield Figure(CELL, "push of 100,000 rows", 1e3 * pushes[1], "ms")
    yield Figure(CELL, "push of 100,000 rows with a log", 1e3 * pushes[2], "ms")
    yield Figure(CELL, "as many bytes written to a file and synced", 1e3 * written[0], "ms")
    for where, (_, own_one) in singles.items():
        yield Figure(CELL, f"round trip of one row, {where}", 1e6 * own_one / scale.of(_ONE_ROW_CALLS), "us")


def seconds_of(rounds: int, calls: Sequence[Callable[[], object]]) -> list[float]:
    """The median seconds of each call, one after another in every round; the first round does not count."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, taken in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in seconds]


def _write(path: Path, data: Tensor) -> None:
    with path.open("wb") as file:
        data.numpy().tofile(file)
        os.fdatasync(file.fileno())


@contextmanager
def _on_core(core: int, threads: Sequence[int]) -> Iterator[None]:
    """Threads, 0 for the calling one, on one core for a while."""
    before = [os.sched_getaffinity(thread) for thread in threads]
    for thread in threads:
        os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        for thread, cores in zip(threads, before, strict=True):
            os.sched_setaffinity(thread, cores)


def _threads(process: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{process}/task")]


def _repeat(scale: Scale, call: Callable[[], object]) -> None:
    for _ in range(scale.of(_ONE_ROW_CALLS)):
        call()


class ServerProcess(NamedTuple):
    address: str
    pid: int
    metrics: str | None


class ServedTable:
    """A table on a server, whose rows are there."""

    def __init__(self, address: str, ids_N: Tensor) -> None:
        set_ps_servers([address])
        # The handle is good as long as there is the module.
        self._module = DistEmbedding(None, _DIM, new_name(), optimizer="sgd")
        set_ps_backend("embedded")
        self._handle = self._module.table.handle
        emb_write(self._handle, ids_N, torch.ones(ids_N.numel(), _DIM))

    def pull(self, ids_N: Tensor) -> Tensor:
        return emb_read(self._handle, ids_N, _DIM)

    def push(self, ids_N: Tensor, grad_ND: Tensor) -> None:
        emb_update(self._handle, ids_N, grad_ND)


@contextmanager
def served(*options: str) -> Iterator[ServerProcess]:
    """A server in a process of its own, of one shard unless the options say otherwise."""
    command = [sys.executable, "-m", "recstore_ops.cli", "serve", "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert server.stdout is not None
            started = _STARTED.match(server.stdout.readline())
            if started is None:
                errors.seek(0)
                raise RuntimeError(f"the server did not start: {errors.read()}")
            yield ServerProcess(started[1], server.pid, started[2])
        finally:
            server.kill()
            server.communicate()
