"""Servers under load for long: with checkpoints, evictions and kills, memory and latency stay flat and counts right.

`RECSTORE_SOAK_SECONDS` says how long, by default 30 seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import served_soak
from served_tables import ServerProcesses

from recstore_ops import RecStoreClient, servers, table_statistics

pytestmark = pytest.mark.tier("all")

SECONDS = float(os.environ.get("RECSTORE_SOAK_SECONDS", "30"))
WORKERS, SHARDS = 3, 2
# The one that is killed again and again; the other one lives throughout, so that nothing it keeps is hidden.
KILLED = 0


@pytest.fixture(autouse=True)
def _embedded_afterwards() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


def started_workers(processes: ServerProcesses) -> list[subprocess.Popen[str]]:
    arguments = [sys.executable, served_soak.__file__, ",".join(processes.addresses)]
    return [
        subprocess.Popen(
            [*arguments, str(worker), str(SECONDS)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for worker in range(WORKERS)
    ]


def watched(processes: ServerProcesses) -> list[list[int]]:
    """Kills a server four times meanwhile, and returns the memory of each as time goes by."""
    resident: list[list[int]] = [[] for _ in range(SHARDS)]
    started, kills = time.monotonic(), 0
    while (passed := time.monotonic() - started) < SECONDS:
        if passed > (kills + 1) * SECONDS / 5:
            processes.kill_and_start_again(KILLED)
            kills += 1
        for shard in range(SHARDS):
            resident[shard].append(processes.resident_bytes(shard))
        time.sleep(SECONDS / 300)
    assert kills
    return resident


@pytest.mark.timeout(SECONDS + 300)
def test_servers_under_load_stay_as_they_are(tmp_path: Path) -> None:
    options = ("--data", str(tmp_path / "tables"), "--durability", "wal", "--checkpoint-every", "2")
    with ServerProcesses(tmp_path, SHARDS, *options) as processes:
        workers = started_workers(processes)
        resident = watched(processes)
        took = [json.loads(worker.communicate(timeout=200)[0]) for worker in workers]
        servers.set_ps_servers(processes.addresses)
        table, counted = served_soak.soaked_table(), table_statistics(served_soak.TABLE)
        assert counted["step"] == sum(map(len, took))
        assert counted["rows"] == counted["inserts"] - counted["deletes"] == len(table.table)
        assert counted["evictions"] > 10 * served_soak.CAPACITY
        assert RecStoreClient().save(tmp_path / "saved").rows == counted["rows"]
    for of_shard in resident:
        half = len(of_shard) // 2
        assert max(of_shard[half:]) < 1.1 * max(of_shard[:half]), of_shard
    for of_worker in took:
        third = len(of_worker) // 3
        # Nothing piles up that each step goes through; what else the machine does may well double its time.
        assert statistics.median(of_worker[-third:]) < 10 * statistics.median(of_worker[:third])
