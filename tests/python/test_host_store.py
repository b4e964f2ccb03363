"""One store for the ranks of a machine: what it gives, who may call it, and what is left of a rank that is killed."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ranks import Ranks
from warm_processes import Ended
from warm_programs import WarmProgram, output_of
from warm_recstore import WarmRecstore, run_recstore

from recstore_ops import current_ps_backend, set_ps_servers
from recstore_ops.sharding import host_store, share_host_store

pytestmark = pytest.mark.tier("test")

STEPS, SECONDS = 4, 60.0

# A rank of a job: number, ranks, folder, and how it goes. Alone it has its tables in its own process.
RANK = """
import json, os, resource, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from recstore_ops import DistEmbeddingBag, SparseOptimizer
from recstore_ops.sharding import host_store, share_host_store

rank, world, folder, way = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
if way == "without memory":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
address, servers = None, []
if world > 1:
    place = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    is_synchronous = way == "synchronous"
    address = share_host_store(
        consistency="synchronous" if is_synchronous else "asynchronous", combine="sum" if is_synchronous else None
    )
    servers = [server.pid for server in host_store._started]
bag = DistEmbeddingBag(None, 64, "t", mode="sum", optimizer="adagrad", lr=0.5)
optimizer = SparseOptimizer(modules=[bag])

def train(*numbers):
    for number in numbers:
        ids = torch.randint(3000, (2000,), generator=torch.Generator().manual_seed(number))
        bag(ids, torch.arange(0, len(ids), 2)).square().mean().backward()
    optimizer.step()

def tell(**what):
    print(json.dumps({"address": address, "servers": servers, **what}), flush=True)

def tell_rows():
    tell(rows=bag.weight[torch.arange(3000)].flatten().tolist())
"""

TURNS = """
for number in range(2 * int(sys.argv[5])):
    if world == 1 or number % world == rank:
        train(number)
    if world > 1:
        dist.barrier()
tell_rows()
"""

TOGETHER = """
for number in range(int(sys.argv[5])):
    if world > 1:
        train(2 * number + rank)
    else:
        train(2 * number, 2 * number + 1)
if world > 1:
    dist.barrier()
tell_rows()
"""

ENDLESS = """
tell()
steps = 0
while not (folder / "end").exists():
    train(steps)
    steps += 1
    (folder / f"steps {rank}").write_text(str(steps))
tell_rows()
os._exit(0)
"""


def ranks_of(folder: Path, way: str, code: str, world: int = 2) -> list[WarmProgram]:
    folder.mkdir(exist_ok=True)
    return [WarmProgram(RANK + code, rank, world, folder, way, STEPS, splits=True) for rank in range(world)]


def all_told(ranks: list[WarmProgram]) -> list[dict[str, Any]]:
    """What ranks say. The store, which all of them keep, has the error stream of the first one open."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(told, ranks))


def told(rank: WarmProgram) -> dict[str, Any]:
    outcome = rank.ended()
    assert outcome.returncode == 0, outcome.stderr
    return {"errors": outcome.stderr, **json.loads(outcome.stdout.splitlines()[-1])}


def waits_until(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if is_so():
            return True
        time.sleep(0.05)
    return False


def is_running(process: int) -> bool:
    """Whether a process runs: one that ended is there until its parent asks, if that still can."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def segments(process: int) -> int:
    """How much shared memory a process has mapped, in segments."""
    return Path(f"/proc/{process}/maps").read_text().count("/memfd:recstore")


def path_of(address: str) -> Path:
    return Path(address.removeprefix("unix:"))


@pytest.mark.parametrize("way", ["shared memory", pytest.param("without memory", marks=pytest.mark.tier("all"))])
def test_ranks_in_turn_train_as_one_process_does_to_the_bit(tmp_path: Path, way: str) -> None:
    outcomes = all_told(ranks_of(tmp_path / "job", way, TURNS))
    (alone,) = all_told(ranks_of(tmp_path / "alone", way, TURNS, world=1))
    assert [outcome["rows"] for outcome in outcomes] == [alone["rows"]] * 2
    for outcome in outcomes:
        said = outcome["errors"].count("recstore: no memory is shared with the server, all goes over its socket: ")
        assert said == (way == "without memory")
    assert waits_until(lambda: not is_running(outcomes[0]["servers"][0]))
    assert not path_of(outcomes[0]["address"]).exists()


@pytest.mark.tier("all")
def test_synchronous_ranks_make_one_step_of_all_gradients(tmp_path: Path) -> None:
    first, second = all_told(ranks_of(tmp_path / "job", "synchronous", TOGETHER))
    (alone,) = all_told(ranks_of(tmp_path / "alone", "", TOGETHER, world=1))
    assert first["rows"] == second["rows"]
    assert first["rows"] == pytest.approx(alone["rows"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.tier("all")), 1])
def test_a_killed_rank_leaves_the_store_and_the_other_rank_going(tmp_path: Path, killed: int) -> None:
    job = ranks_of(tmp_path, "", ENDLESS)
    begun = [json.loads(rank.stdout.readline()) for rank in job]
    (server,) = begun[0]["servers"]
    steps = [tmp_path / "steps 0", tmp_path / "steps 1"]

    def done(rank: int) -> int:
        text = steps[rank].read_text() if steps[rank].exists() else ""
        return int(text or 0)

    assert waits_until(lambda: min(done(0), done(1)) >= 3)
    assert segments(server) == 2
    os.kill(job[killed].pid, signal.SIGKILL)
    before = done(1 - killed)
    assert waits_until(lambda: segments(server) == 1), "the memory of the killed rank stays"
    assert waits_until(lambda: done(1 - killed) >= before + 5), "the other rank waits"
    assert is_running(server)
    (tmp_path / "end").write_text("")
    rows = told(job[1 - killed])["rows"]
    assert len(rows) == 3000 * 64
    assert all(math.isfinite(value) for value in rows)
    job[killed].communicate(timeout=SECONDS)
    assert waits_until(lambda: not is_running(server))
    assert not path_of(begun[0]["address"]).exists()


@pytest.mark.tier("all")
def test_jobs_beside_each_other_have_stores_of_their_own(tmp_path: Path) -> None:
    jobs = [ranks_of(tmp_path / name, "", TURNS) for name in ("one", "other")]
    first, second, *others = all_told([rank for job in jobs for rank in job])
    one, other = (first, second), tuple(others)
    assert one[0]["address"] == one[1]["address"] != other[0]["address"] == other[1]["address"]
    assert one[0]["rows"] == other[0]["rows"]


def refused(group: Any, **choice: Any) -> str:
    try:
        share_host_store(group, **choice)
    except ValueError as error:
        return str(error)
    return "nothing"


def apart(group: Any) -> str:
    machine = f"host{group.rank()}"
    with patch.object(host_store, "_machine", lambda: machine):
        return refused(group)


def without_a_server(group: Any) -> str:
    with patch.object(host_store.tempfile, "gettempdir", lambda: "/no such folder"):
        try:
            share_host_store(group)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_what_cannot_be_shared_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for rank in ranks.run(2, apart):
        assert rank == (
            "one store is for the ranks of one machine, and rank 0 is on host0, rank 1 on host1: give each machine's "
            "ranks as process_group, or shard tables with the process_group of modules"
        )
    expected = r"the store of this machine did not start at /no such folder/recstore-\S+: its server ended with 2"
    first, other = ranks.run(2, without_a_server)
    assert re.fullmatch(expected, first)
    assert re.fullmatch(f"rank 0 could not start the store of this machine: {expected}", other)


def without_a_python(group: Any) -> str:
    with patch.object(host_store.sys, "executable", "/no such python"):
        try:
            share_host_store(group)
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_whatever_keeps_the_store_from_starting_all_ranks_hear_of(ranks: Ranks) -> None:
    first, other = ranks.run(2, without_a_python)
    assert first.startswith("FileNotFoundError: ")
    assert other.startswith("RuntimeError: rank 0 could not start the store of this machine: ")
    assert "/no such python" in first
    assert "/no such python" in other


def differently(group: Any, first: dict[str, Any], other: dict[str, Any]) -> str:
    try:
        share_host_store(group, **(other if group.rank() else first))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({}, "the same consistency, and rank 0 gives 'synchronous', rank 1 'asynchronous'"),
        ({"consistency": "synchronous"}, "the same combine, and rank 0 gives 'sum', rank 1 'mean'"),
        (
            {"consistency": "synchronous", "combine": "sum", "timeout": 5.0},
            "and rank 0 gives 30.0, rank 1 5.0",
        ),
        ({"consistency": "sync"}, 'consistency must be "asynchronous" or "synchronous", got "sync"'),
    ],
)
def test_ranks_share_a_store_of_one_kind(ranks: Ranks, other: dict[str, Any], message: str) -> None:
    for said in ranks.run(2, differently, {"consistency": "synchronous", "combine": "sum"}, other):
        assert message in said or "all ranks give the same consistency" in said


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        share_host_store()
    choices: list[tuple[dict[str, Any], str]] = [
        ({"consistency": "bounded"}, 'consistency must be "asynchronous" or "synchronous", got "bounded"'),
        ({"combine": "mean"}, 'combine is for the consistency synchronous, got combine "mean" and asynchronous'),
        ({"consistency": "synchronous", "combine": "max"}, 'combine must be "mean" or "sum", got "max"'),
    ]
    for choice, message in choices:
        with (
            patch.object(host_store.dist, "is_initialized", lambda: True),
            patch.object(host_store.dist, "get_world_size", lambda _: 2),
            pytest.raises(ValueError, match=re.escape(message)),
        ):
            share_host_store(**choice)


@pytest.mark.parametrize("address", ["unix:relative", "unix:", "unix"])
def test_a_socket_has_an_absolute_path(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f'or "unix:" and an absolute path, got "{address}"')):
        set_ps_servers([address])


@pytest.mark.parametrize(
    ("worker", "error", "message"),
    [
        (-1, ValueError, "worker must be from 0 to 4294967295, got -1"),
        (2**32, ValueError, "worker must be from 0 to 4294967295, got 4294967296"),
        (1.5, TypeError, "worker must be an int from 0 on, got 1.5"),
        (True, TypeError, "worker must be an int from 0 on, got True"),
    ],
)
def test_a_worker_is_a_number_from_zero_on(worker: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        set_ps_servers(["unix:/no such socket"], worker=worker)
    assert current_ps_backend() == "embedded"


def test_a_server_on_a_socket_ends_when_nobody_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    server = WarmRecstore("serve", "--unix", path, "--exit-when-unused", 1)
    assert server.stdout.readline() == f"shard 0 of 1 at unix:{path}\n"
    code = """
import sys, time, torch
from recstore_ops import DistEmbedding, set_ps_servers
set_ps_servers([f"unix:{sys.argv[1]}"])
rows = DistEmbedding(None, 2, "t")(torch.arange(3))
time.sleep(2)
print(rows.shape == (3, 2) and bool((DistEmbedding(None, 2, "t")(torch.arange(3)) == rows).all()))
"""
    assert output_of(code, path) == "True\n"
    assert server.ended().returncode == 0
    assert not path.exists()


def error_of(outcome: Ended) -> str:
    assert outcome.returncode != 0
    return " ".join(outcome.stderr.split())


def test_a_socket_takes_the_place_of_a_port(tmp_path: Path) -> None:
    path = tmp_path / "s"
    refused = error_of(run_recstore("serve", "--unix", path, "--port", 0))
    assert "takes the place of --port 0: give one of them" in refused
    path.write_text("")
    refused = error_of(run_recstore("serve", "--unix", path))
    assert "there is a file that is no socket" in refused


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_are_turned_away_even_if_the_file_lets_them_in(tmp_path: Path) -> None:
    path = Path(tempfile.gettempdir()) / f"recstore-test-{os.getpid()}.sock"
    server = WarmRecstore("serve", "--unix", path)
    try:
        assert server.stdout.readline() == f"shard 0 of 1 at unix:{path}\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o666)
        code = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as peer:
    peer.settimeout(20)
    peer.connect(sys.argv[1])
    print(peer.recv(1), flush=True)
os._exit(0)
"""
        assert output_of(code, path) == "b''\n"
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=SECONDS)
