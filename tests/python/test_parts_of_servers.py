"""Tables of which each server or rank has a part: half steps, lost rows, capacities that are shared, ends of logs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from served_tables import ServerProcesses
from sharded_training import Group
from warm_programs import output_of
from warm_recstore import run_recstore

from recstore_ops import (
    DistEmbedding,
    EmbeddingTableConfig,
    RecStoreClient,
    SparseOptimizer,
    inspect_table,
    servers,
    table_statistics,
)
from recstore_ops.servers.metrics_text import fetch

pytestmark = pytest.mark.tier("test")

RESTARTED = "it was restarted since its tables were opened: load a checkpoint, or restart the program"

FIRST_PROGRAM = """
import os, signal, sys, torch
from recstore_ops import DistEmbedding, SparseOptimizer, set_ps_servers
set_ps_servers(sys.argv[1].split(","), timeout=1.0)
module = DistEmbedding(None, 4, "t", optimizer={"kind": "adam", "lr": 0.1})
optimizer = SparseOptimizer(modules=[module])
for step in range(3):
    module(torch.arange(64)).sum().backward()
    if step == 2:
        os.kill(int(sys.argv[2]), signal.SIGKILL)
    try:
        optimizer.step()
    except RuntimeError as error:
        print(error)
"""
NEXT_PROGRAM = """
import sys, torch
from recstore_ops import DistEmbedding, SparseOptimizer, checkpoint, set_ps_servers, table_statistics
set_ps_servers(sys.argv[1].split(","))
module = DistEmbedding(None, 4, "t", optimizer={"kind": "adam", "lr": 0.1}, on_existing="share")
optimizer = SparseOptimizer(modules=[module])
module(torch.arange(64)).sum().backward()
optimizer.step()
print(checkpoint.save(sys.argv[2]).rows, table_statistics("t")["step"])
"""


@pytest.fixture(autouse=True)
def _embedded_again() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


def test_the_program_after_a_half_step_trains_and_saves(tmp_path: Path) -> None:
    with ServerProcesses(tmp_path, 2, "--data", str(tmp_path / "data"), "--durability", "wal") as processes:
        told = output_of(FIRST_PROGRAM, ",".join(processes.addresses), str(processes.processes[1].pid))
        assert re.search(r"shard 1 at .* is unavailable", told)
        processes.kill_and_start_again(1)
        told = output_of(NEXT_PROGRAM, ",".join(processes.addresses), tmp_path / "saved")
        assert told.split() == ["64", "4"]


def test_a_client_by_name_refuses_rows_that_a_server_lost(tmp_path: Path, table_name: Callable[[], str]) -> None:
    name, ids = table_name(), torch.arange(50)
    options = ("--data", str(tmp_path / "data"), "--durability", "checkpoint", "--checkpoint-every", "3600")
    with ServerProcesses(tmp_path, 2, *options) as processes:
        servers.set_ps_servers(processes.addresses, timeout=2.0)
        client = RecStoreClient()
        client.init_embedding_table(name, EmbeddingTableConfig(None, 2))
        client.push(name, ids, torch.ones(50, 2))
        client.save(tmp_path / "saved")
        processes.kill_and_start_again(0)
        calls: list[Callable[[], object]] = [
            lambda: client.pull(name, ids),
            lambda: client.update(name, ids, torch.ones(50, 2)),
            lambda: client.push(name, ids, torch.ones(50, 2)),
            lambda: client.stats(name),
            lambda: RecStoreClient().pull(name, ids),
            lambda: client.init_embedding_table(name, EmbeddingTableConfig(None, 2)),
        ]
        for call in calls:
            with pytest.raises((RuntimeError, OSError, ValueError), match=RESTARTED):
                call()
        client.load(tmp_path / "saved")
        assert torch.equal(client.pull(name, ids), torch.ones(50, 2))


@pytest.mark.parametrize("world", [1, 3])
def test_a_capacity_is_shared_by_servers(tmp_path: Path, table_name: Callable[[], str], world: int) -> None:
    name = table_name()
    with ServerProcesses(tmp_path, world) as processes:
        servers.set_ps_servers(processes.addresses)
        _fill(DistEmbedding(None, 2, name, eviction={"capacity": 31, "interval": 1}))
        found = table_statistics(name)
        assert found["capacity_share"] == -(-31 // world)
        assert 31 <= found["rows"] < 31 + world
        report = inspect_table(name)
        assert (report.config.eviction or {})["capacity"] == 31
        assert report.statistics["capacity_share"] == -(-31 // world)
        saved = RecStoreClient().save(tmp_path / "saved").rows
        assert saved == found["rows"]
    shown = run_recstore("inspect", tmp_path / "saved", "--format", "json")
    (table,) = json.loads(shown.stdout)["tables"]
    assert (table["config"]["eviction"]["capacity"], table["statistics"]["capacity_share"]) == (31, -(-31 // world))


def _fill(module: DistEmbedding) -> None:
    optimizer = SparseOptimizer(modules=[module])
    for step in range(4):
        optimizer.zero_grad()
        module(torch.arange(step * 50, step * 50 + 200)).sum().backward()
        optimizer.step()
    RecStoreClient().evict(module.table.name)


def _rows_of_a_rank(group: Group, name: str) -> tuple[int, int]:
    _fill(DistEmbedding(None, 2, name, eviction={"capacity": 31, "interval": 1}, process_group=group))
    found = table_statistics(name)
    return found["rows"], found["capacity_share"]


def test_a_capacity_is_shared_by_ranks(ranks: Ranks, table_name: Callable[[], str]) -> None:
    found = ranks.run(3, _rows_of_a_rank, table_name())
    assert [share for _, share in found] == [11] * 3
    assert 31 <= sum(rows for rows, _ in found) < 34


def test_a_flipped_bit_in_the_last_record_of_a_log_is_told(tmp_path: Path, table_name: Callable[[], str]) -> None:
    name, data = table_name(), tmp_path / "data"
    options = ("--data", str(data), "--durability", "wal", "--metrics-port", "0")
    with ServerProcesses(tmp_path, 1, *options) as processes:
        servers.set_ps_servers(processes.addresses)
        client = RecStoreClient()
        client.init_embedding_table(name, EmbeddingTableConfig(None, 2))
        client.push(name, torch.arange(3), torch.ones(3, 2))
        client.push(name, torch.arange(3), torch.full((3, 2), 2.0))
        processes.processes[0].kill()
        processes.processes[0].wait()
        (log,) = (data / "shard-0-of-1" / "log").glob("*.log")
        whole = bytearray(log.read_bytes())
        whole[-40] ^= 1
        log.write_bytes(whole)
        with ServerProcesses(tmp_path, 1, *options) as again:
            servers.set_ps_servers(again.addresses)
            assert torch.equal(RecStoreClient().pull(name, torch.arange(3)), torch.ones(3, 2))
            left_out = fetch(again.metrics[0]).total("recstore_log_left_out_bytes")
            assert 0 < left_out < len(whole)
            servers.set_ps_backend("embedded")
            told = again.logged
            # Before the first checkpoint too.
            place = data / "shard-0-of-1"
            for directory in (place, place / "checkpoint"):
                early = json.loads(run_recstore("inspect", directory, "--format", "json").stdout)
                assert (early["left_out"]["file"], early["left_out"]["bytes"]) == (log.name, left_out)
                assert (early["snapshots"], early["tables"]) == ([], [])
                shown = run_recstore("inspect", directory).stdout
                assert f"no checkpoint yet in {place / 'checkpoint'}: the rows are in the log" in shown
                assert f"the last {left_out:.0f} bytes of the log's file {log.name}" in shown
            missing = run_recstore("inspect", place, "--table", "t")
            assert (missing.returncode, missing.stderr) == (
                2,
                'recstore: the checkpoint has no table "t"; it has no tables\n',
            )
            again.stop()
    for expected in ("left out the end of the log", str(log), f"bytes={left_out:.0f}"):
        assert expected in told, told
    for directory in (place, place / "checkpoint"):
        found = json.loads(run_recstore("inspect", directory, "--format", "json").stdout)
        assert (found["left_out"]["file"], found["left_out"]["bytes"]) == (log.name, left_out)
        assert len(found["snapshots"]) == 1
        assert (
            f"the last {left_out:.0f} bytes of the log's file {log.name}" in run_recstore("inspect", directory).stdout
        )
