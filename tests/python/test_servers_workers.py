"""Several workers, each a process of its own, that train the tables of the same servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from served_tables import ServerProcesses
from warm_processes import side_by_side
from worker_training import NUM_IDS, batch, embedding, work

import recstore_ops
from recstore_ops import DistEmbedding, SparseOptimizer, leave_ps_workers, ps_barrier, ps_workers, servers

pytestmark = pytest.mark.tier("test")

WORKERS = 3
STEPS = 12
SCRIPT = Path(__file__).parent / "worker_training.py"


def run_workers(processes: ServerProcesses, mode: str) -> list[dict[str, Any]]:
    """Runs all workers to their end and returns what each saw."""
    return side_by_side(work, [(processes.addresses, number, STEPS, mode) for number in range(WORKERS)])


def test_synchronous_workers_are_one_worker_with_the_joined_batch(tmp_path: Path) -> None:
    options = ("--workers", str(WORKERS), "--consistency", "synchronous")
    with ServerProcesses(tmp_path, 2, *options) as processes:
        seen = run_workers(processes, "plain")
    # Initial rows depend on the table's name.
    model, optimizer = embedding("shared")
    for step in range(STEPS):
        ids, weights = zip(*(batch(number, step) for number in range(WORKERS)), strict=True)
        (model(torch.cat(ids)) * torch.cat(weights)).sum().backward()
        optimizer.step()
    expected = model(torch.arange(NUM_IDS)).detach()
    for worker in seen:
        torch.testing.assert_close(torch.tensor(worker["rows"]), expected, atol=1e-6, rtol=0)


@pytest.mark.tier("all")
def test_no_worker_is_ahead_by_more_than_the_bound(tmp_path: Path) -> None:
    options = ("--workers", str(WORKERS), "--consistency", "bounded", "--staleness", "2")
    with ServerProcesses(tmp_path, 2, *options) as processes:
        seen = run_workers(processes, "slow")
    assert all(ahead == 2 for worker in seen for ahead in worker["ahead"]), [worker["ahead"] for worker in seen]


def train(model: DistEmbedding, optimizer: SparseOptimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.arange(4)).sum().backward()
        optimizer.step()


@pytest.mark.tier("all")
def test_a_worker_that_was_killed_is_reported_to_the_others(tmp_path: Path) -> None:
    options = ("--workers", "2", "--consistency", "synchronous", "--heartbeat-timeout", "2")
    with ServerProcesses(tmp_path, 1, *options) as processes:
        command = [sys.executable, str(SCRIPT), *processes.addresses, "1", "1000000", "slow"]
        other = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            servers.set_ps_servers(processes.addresses, worker=0)
            model, optimizer = embedding("shared")
            ps_barrier("begin")
            assert [state.worker for state in ps_workers()[0].workers] == [0, 1]
            train(model, optimizer, 1)
            other.kill()
            with pytest.raises(
                RuntimeError, match=r"worker 1 was not heard of for 2\.\d s, and its updates are waited"
            ):
                train(model, optimizer, 100)
            leave_ps_workers()
        finally:
            other.kill()
            other.wait()
            servers.set_ps_backend("embedded")


@pytest.mark.tier("all")
def test_workers_need_servers_that_expect_them(tmp_path: Path) -> None:
    for call in (ps_workers, leave_ps_workers, lambda: ps_barrier("b")):
        with pytest.raises(RuntimeError, match="tables are not opened on servers: choose them with set_ps_servers"):
            call()
    with ServerProcesses(tmp_path, 1, "--workers", "2") as processes:
        with pytest.raises(ValueError, match="there is no worker 2 of 2"):
            recstore_ops.set_ps_servers(processes.addresses, worker=2)
        assert recstore_ops.current_ps_backend() == "embedded"
        for timeout in (-1.0, 1e18, float("nan")):
            with pytest.raises(ValueError, match="a time must be from 0 to 31622400 seconds, got"):
                recstore_ops.set_ps_servers(processes.addresses, timeout=timeout)
    command = [sys.executable, "-m", "recstore_ops.cli", "serve", "--port", "0", "--consistency", "bounded"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "bounded staleness needs the number of workers" in refused.stderr
