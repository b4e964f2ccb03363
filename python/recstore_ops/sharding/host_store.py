"""One store for the processes of a job on one machine, in place of a shard in each."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from recstore_ops.servers.addresses import UNIX_PREFIX
from recstore_ops.servers.choosing import set_ps_servers
from recstore_ops.servers.workers import Combine, Consistency, WorkerSync
from recstore_ops.sharding.collective import Collective

UNUSED_SECONDS = 2.0
"""How long the store stays when the last process of its job has ended."""

_started: list[subprocess.Popen[str]] = []
"""The servers that this process started. They do not end with it."""


def share_host_store(
    process_group: dist.ProcessGroup | None = None,
    *,
    consistency: str = "asynchronous",
    combine: str | None = None,
    timeout: float = 30.0,
) -> str:
    """Opens tables in one store that all ranks of a job on this machine share, from now on.

    All ranks call it together, before they make modules, which take no `process_group` then. The first one starts a
    server as a process of its own, so that the store outlives any rank. The server ends soon after the last rank. Ids,
    rows and gradients go through memory that each rank shares with it.

    Args:
        process_group: the ranks; all of the job by default.
        consistency: `asynchronous` makes the step of each rank as it comes, an optimizer step of its own. `synchronous`
            makes one step of the gradients of all ranks, when all have come.
        combine: whether `synchronous` takes the `mean` of the ranks' gradients, which is its default, or their `sum`.
        timeout: seconds that a call may take; see `recstore_ops.set_ps_servers`.

    Returns:
        The address of the store, `unix:/path`, as `set_ps_servers` takes it.

    Raises:
        RuntimeError: no process group was made, or the server does not start, or another rank could not call this.
        ValueError: an unknown `consistency` or `combine`, a `combine` without `synchronous`, ranks of several machines,
            or that give other arguments than the first one.
        OSError: no process can be started.
        ConnectionError: the server does not answer.
    """
    if not dist.is_initialized():
        raise RuntimeError("share_host_store is for the ranks of a job: call init_process_group first")
    together = Collective(process_group or dist.group.WORLD)
    ranks = dist.get_world_size(process_group)
    worker_sync = together.all_or_none("share a store", lambda: _teamwork(consistency, combine, ranks))
    _check_machine(process_group)
    mode = {"consistency": worker_sync.consistency.value, "combine": worker_sync.combine.value}
    together.check_same("share_host_store", **mode, timeout=timeout)
    # After all checks, so that no rank refuses when the server runs.
    address = together.of_first("start the store of this machine", lambda: _start(worker_sync))
    set_ps_servers([address], timeout=timeout, worker=together.rank if worker_sync.workers else None)
    return address


def _teamwork(consistency: str, combine: str | None, ranks: int) -> WorkerSync:
    if consistency not in ("asynchronous", "synchronous"):
        raise ValueError(f'consistency must be "asynchronous" or "synchronous", got "{consistency}"')
    if combine not in (None, "mean", "sum"):
        raise ValueError(f'combine must be "mean" or "sum", got "{combine}"')
    if consistency == "synchronous":
        return WorkerSync(workers=ranks, consistency=Consistency.SYNCHRONOUS, combine=Combine(combine or "mean"))
    if combine is not None:
        raise ValueError(f'combine is for the consistency synchronous, got combine "{combine}" and {consistency}')
    return WorkerSync()


def _check_machine(group: dist.ProcessGroup | None) -> None:
    """Checks that all ranks are on one machine, and in one container of it."""
    machines: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(machines, _machine(), group=group)
    for rank, machine in enumerate(machines):
        if machine != machines[0]:
            raise ValueError(
                f"one store is for the ranks of one machine, and rank 0 is on {machines[0]}, rank {rank} on {machine}: "
                "give each machine's ranks as process_group, or shard tables with the process_group of modules"
            )


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".strip()


def _start(worker_sync: WorkerSync) -> str:
    """Starts a server on a socket of its own, and returns its address when it serves.

    Raises:
        RuntimeError: it ended; what it says is on the error stream.
    """
    path = Path(tempfile.gettempdir()).absolute() / f"recstore-{os.getpid()}-{secrets.token_hex(4)}.sock"
    options = ["--unix", str(path), "--exit-when-unused", str(UNUSED_SECONDS)]
    if worker_sync.workers is not None:
        options += ["--workers", str(worker_sync.workers), "--consistency", worker_sync.consistency.value]
        options += ["--combine", worker_sync.combine.value]
    command = [sys.executable, "-m", "recstore_ops", "serve", *options]
    # A session of its own: what ends the group of this process does not end it.
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    _started.append(server)
    assert server.stdout is not None
    for line in server.stdout:
        if str(path) in line:
            return f"{UNIX_PREFIX}{path}"
    raise RuntimeError(f"the store of this machine did not start at {path}: its server ended with {server.wait()}")
