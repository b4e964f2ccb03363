"""Several stores on one directory: a job that hung, a script that runs again, servers that lost their tables, ranks."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import drop_all_tables, snapshots_of
from ranks import Ranks
from served_tables import ServerProcesses
from warm_programs import WarmProgram, output_of

from recstore_ops import DistEmbedding, EmbeddingTableConfig, RecStoreClient, checkpoint, set_ps_backend, sharding

pytestmark = pytest.mark.tier("test")

OVERTAKEN = r"another store has saved the newest snapshot here, {newest}, since this one saved or loaded {own}: "


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    set_ps_backend("embedded")
    drop_all_tables()


JOB = """
import sys, torch
from recstore_ops import EmbeddingTableConfig, RecStoreClient, checkpoint, set_ps_servers
place, first, rows, loads, *servers = sys.argv[1:]
if servers:
    set_ps_servers(servers)
client = RecStoreClient()
client.init_embedding_table("t", EmbeddingTableConfig(None, 1, optimizer="sgd"))
if loads == "load":
    checkpoint.load(place)
client.push("t", torch.arange(int(first), int(first) + int(rows)), torch.ones(int(rows), 1))
report = checkpoint.save(place, kind="auto")
print(report.snapshot, report.kept, flush=True)
for line in sys.stdin:
    client.push("t", torch.tensor([-1]), torch.ones(1, 1))
    print(checkpoint.save(place, kind=line.strip()).snapshot, flush=True)
"""


def job(place: object, first: int, rows: int, loads: str = "new", *servers: str, warns: str = "error") -> list[str]:
    """Runs a job that saves once; returns the snapshot that it saved, and the one that stays of another."""
    return output_of(JOB, place, first, rows, loads, *servers, warns=warns).split()


def rows_in(place: object, **options: Any) -> int:
    return checkpoint.load(str(place), **options).tables["t"]


def push(ids: int) -> None:
    RecStoreClient().init_embedding_table("t", EmbeddingTableConfig(None, 1, optimizer="sgd"))
    RecStoreClient().push("t", torch.arange(ids), torch.ones(ids, 1))


@pytest.mark.parametrize("kind", ["full", "delta", "auto"])
def test_a_job_that_hung_does_not_replace_what_the_next_one_saved(tmp_path: Path, kind: Any) -> None:
    push(100)
    own = checkpoint.save(tmp_path).snapshot
    newest, kept = job(tmp_path, 100, 100, "load")
    assert kept == "None"
    push(3)
    expected = "a delta must follow" if kind == "delta" else OVERTAKEN.format(newest=newest, own=own)
    for save in (checkpoint.save, lambda *a, **k: checkpoint.save_async(*a, **k).result()):
        with pytest.raises(RuntimeError, match=expected):
            save(tmp_path, kind=kind)
    assert rows_in(tmp_path) == 200
    # It goes on from there like any other.
    push(201)
    checkpoint.save(tmp_path, kind=kind)
    assert rows_in(tmp_path) == 201


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_script_that_runs_again_saves_beside_what_was_there(tmp_path: Path, scheme: str) -> None:
    place = f"{scheme}{tmp_path}"
    before, _ = job(place, 0, 1000)
    push(1)
    with pytest.warns(RuntimeWarning, match=re.escape(f'checkpoint.load({place!r}, snapshot="{before}")')):
        report = checkpoint.save(place, kind="auto")
    assert (report.kept, report.is_delta) == (before, False)
    # Once is enough.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("auto", "full"):
            assert checkpoint.save(place, kind=kind).kept is None
    third = WarmProgram(JOB, place, 0, 5, "new", splits=True).ended()
    assert third.returncode == 1
    assert re.search(f"snapshots of two other stores already, {before} and the newest, [0-9a-f]+: save", third.stderr)
    assert rows_in(place) == 1
    assert rows_in(place, snapshot=before) == 1000
    with pytest.raises(RuntimeError, match="there is no snapshot 0123456789abcdef"):
        checkpoint.load(place, snapshot="0123456789abcdef")
    with pytest.raises(TypeError, match="snapshot must be the name of a snapshot, got 3"):
        checkpoint.load(place, snapshot=3)  # type: ignore[arg-type]
    saved = checkpoint.save(place, replace=True)
    assert rows_in(place) == 1000
    if not scheme:
        assert [snapshot["id"] for snapshot in snapshots_of(tmp_path)] == [saved.snapshot]


def test_what_stays_is_neither_pruned_nor_compacted(tmp_path: Path) -> None:
    before, _ = job(tmp_path, 0, 10)
    push(1)
    with pytest.warns(RuntimeWarning, match="has snapshots of another store"):
        checkpoint.save_async(tmp_path).result()
    for rows in (2, 3):
        push(rows)
        checkpoint.save(tmp_path, kind="delta", keep=1)
    report = checkpoint.compact(tmp_path)
    assert report is not None
    assert report.rows == 3
    push(4)
    newest = checkpoint.save(tmp_path, keep=3).snapshot
    assert checkpoint.prune(tmp_path, 1).kept == [before, newest]
    assert checkpoint.verify(tmp_path).is_sound
    assert (rows_in(tmp_path, snapshot=before), rows_in(tmp_path)) == (10, 4)


def save_of_ranks(group: dist.ProcessGroup, path: Path, rows: int, replace: bool) -> tuple[str, str | None, list[str]]:
    table = DistEmbedding(None, 1, "t", process_group=group, on_existing="share")
    ids = torch.arange(rows)
    own = ids[checkpoint.shard_of(ids, group.size()) == group.rank()]
    table.weight[own] = torch.ones(len(own), 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = sharding.save(path, group, replace=replace)
    return report.snapshot, report.kept, [str(each.message) for each in told if each.category is RuntimeWarning]


def load_in_ranks(group: dist.ProcessGroup, path: Path, snapshot: str | None) -> int:
    return sharding.load(path, group, snapshot=snapshot).tables["t"]


def test_ranks_are_one_store(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    before, _ = job(tmp_path, 0, 50)
    (_, kept, told), (_, _, by_second) = ranks.run(2, save_of_ranks, tmp_path, 20, False)
    assert (kept, by_second) == (before, [])
    assert [f'snapshot="{before}"' in message for message in told] == [True]
    (newest, kept, told), _ = ranks.run(2, save_of_ranks, tmp_path, 20, False)
    assert (kept, told) == (None, [])
    checkpoint.load(tmp_path)
    newer = checkpoint.save(tmp_path).snapshot
    for error in ranks.errors(2, save_of_ranks, tmp_path, 20, False):
        assert f"since this one saved or loaded {newest}" in error.message or "could not" in error.message
    assert [snapshot["id"] for snapshot in snapshots_of(tmp_path)] == [before, newer]
    assert sum(ranks.run(2, load_in_ranks, tmp_path, before)) == 50
    ranks.run(2, save_of_ranks, tmp_path, 60, True)
    assert rows_in(tmp_path) == 60
    assert len(snapshots_of(tmp_path)) == 1


@pytest.mark.parametrize("shards", [1, 2])
def test_servers_that_lost_their_tables_keep_the_backup(tmp_path: Path, shards: int) -> None:
    backup = tmp_path / "backup"
    with ServerProcesses(tmp_path, shards) as processes:
        before, _ = job(backup, 0, 1000, "new", *processes.addresses)
        # A new program of the same servers goes on.
        before, kept = job(backup, 1000, 1, "new", *processes.addresses)
        assert (kept, len(snapshots_of(backup))) == ("None", 2)
        for shard in range(shards):
            processes.kill_and_start_again(shard)
        newest, kept = job(backup, 0, 1, "new", *processes.addresses, warns="default")
        assert kept == before
        assert rows_in(backup) == 1
        restores = f"""
import sys
from recstore_ops import RecStoreClient, checkpoint, set_ps_servers
set_ps_servers(sys.argv[1:])
print(RecStoreClient().load({str(backup)!r}, snapshot={before!r}).tables["t"])
checkpoint.save({str(backup)!r}, replace=True)
"""
        assert output_of(restores, *processes.addresses, warns="error") == "1001\n"
    assert rows_in(backup) == 1001
    assert newest not in [snapshot["id"] for snapshot in snapshots_of(backup)]


def test_servers_with_a_log_are_the_same_store_after_a_crash(tmp_path: Path) -> None:
    backup, options = tmp_path / "backup", ("--data", str(tmp_path / "data"), "--durability", "wal")
    with ServerProcesses(tmp_path, 2, *options) as processes:
        for round in range(3):
            _, kept = job(backup, 100 * round, 100, "new", *processes.addresses)
            assert kept == "None"
            for shard in range(2):
                processes.kill_and_start_again(shard)
    assert rows_in(backup) == 300


def refusal(place: object, *servers: str) -> str:
    """Runs a job whose save is refused, and returns why."""
    ended = WarmProgram(JOB, place, 0, 5, "new", *servers, splits=True).ended()
    assert ended.returncode == 1, ended
    return ended.stderr.splitlines()[-1]


def test_servers_with_a_log_know_after_a_crash_that_they_were_overtaken(tmp_path: Path) -> None:
    backup, options = tmp_path / "backup", ("--data", str(tmp_path / "data"), "--durability", "wal")
    with ServerProcesses(tmp_path, 2, *options) as processes:
        own, _ = job(backup, 0, 100, "new", *processes.addresses)
        newest, _ = job(backup, 100, 1, "load")
        for _ in range(2):
            assert re.search(OVERTAKEN.format(newest=newest, own=own), refusal(backup, *processes.addresses))
            for shard in range(2):
                processes.kill_and_start_again(shard)
    assert rows_in(backup) == 101


def test_copies_of_a_servers_directory_drop_nothing_of_one_another(tmp_path: Path) -> None:
    backup, data, copy = tmp_path / "backup", tmp_path / "data", tmp_path / "copy"
    with ServerProcesses(tmp_path, 2, "--data", str(data), "--durability", "wal") as processes:
        own, _ = job(backup, 0, 100, "new", *processes.addresses)
        shutil.copytree(data, copy)
        newest, _ = job(backup, 100, 1, "new", *processes.addresses)
        with ServerProcesses(tmp_path, 2, "--data", str(copy), "--durability", "wal") as clone:
            expected = (
                f"a later state or a copy of this store has saved the newest snapshot here, {newest}, since this "
                f"one saved or loaded {own}: save elsewhere"
            )
            assert expected in refusal(backup, *clone.addresses)
            assert job(backup, 101, 1, "new", *processes.addresses)[1] == "None"
            newest, kept = job(backup, 0, 1, "load", *clone.addresses)
            assert kept == "None"
        assert f"has saved the newest snapshot here, {newest}" in refusal(backup, *processes.addresses)
    shutil.rmtree(data)
    shutil.copytree(copy, data)
    with ServerProcesses(tmp_path, 2, "--data", str(data), "--durability", "wal") as restored:
        assert job(backup, 0, 1, "new", *restored.addresses)[1] == "None"
    assert rows_in(backup) == 102
