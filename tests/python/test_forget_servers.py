"""`forget` in the directories of servers that are down, and on servers that run; and killed at any moment."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import drop_all_tables
from forgotten import bytes_of_rows, distinctive_ids, files, holders
from served_tables import ServerProcesses
from torch import Tensor
from warm_recstore import WarmRecstore, run_recstore

from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer, Table, checkpoint, forget, servers
from recstore_ops.ops import operators

pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.embedded_only("the tests start servers of their own"),
]

IDS = distinctive_ids(400, seed=1)
GONE = IDS[[7, 99, 210]]
STAYS = IDS[~torch.isin(IDS, GONE)]
KEPT = STAYS.sort().values.tolist()


@pytest.fixture(autouse=True)
def _embedded_again() -> Iterator[None]:
    drop_all_tables()
    yield
    servers.set_ps_backend("embedded")
    drop_all_tables()


def train(processes: ServerProcesses, steps: int = 3) -> list[bytes]:
    """Trains a table on servers; returns the bytes of the rows that `GONE` had after each step."""
    servers.set_ps_servers(processes.addresses)
    module = DistEmbedding(None, 8, "user", optimizer={"kind": "adagrad", "lr": 0.1}, on_existing="share")
    optimizer, rows = SparseOptimizer(modules=[module]), []
    for number in range(steps):
        torch.manual_seed(number)
        found = module(IDS)
        (found * torch.randn_like(found)).sum().backward()
        optimizer.step()
        rows += bytes_of_rows("user", GONE, ["state_sum"])
    return rows


def ids_now() -> list[int]:
    """The ids that the table has, here or on the servers that are in use."""
    table = Table.open("user")
    return operators.hashtable_ids(table.handle).sort().values.tolist()


def has_rows(processes: ServerProcesses) -> tuple[list[int], tuple[Tensor, Tensor]]:
    """The ids that servers have, and rows and slots of those that are to stay."""
    servers.set_ps_servers(processes.addresses)
    table = Table.open("user")
    state = operators.emb_read(table.handle, STAYS, 8), operators.hashtable_slot(table.handle, STAYS, "state_sum")
    return ids_now(), state


def assert_equal(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("durability", "shards", "ends"),
    [
        pytest.param("wal", 1, signal.SIGKILL, marks=pytest.mark.tier("test")),
        ("wal", 1, signal.SIGTERM),
        ("wal", 3, signal.SIGKILL),
        ("checkpoint", 2, signal.SIGTERM),
    ],
)
def test_servers_that_are_down_forget(tmp_path: Path, durability: str, shards: int, ends: int) -> None:
    data, options = tmp_path / "data", ("--data", str(tmp_path / "data"), "--durability", durability)
    with ServerProcesses(tmp_path, shards, *options) as processes:
        rows = train(processes)
        _, expected = has_rows(processes)
        with pytest.raises(ValueError, match="a server uses the directory: end it first"):
            forget(data, "user", GONE)
        if ends == signal.SIGTERM:
            processes.stop()
        # Servers that are killed have rows in their logs alone.
    assert holders(data, GONE, rows) != set()
    before = files(data)
    told = forget(data, "user", GONE, dry_run=True)
    assert files(data) == before
    assert told.not_found == ()
    report = forget(data, "user", GONE)
    assert report.is_forgotten
    assert [place.kind for place in report.places] == ["server"] * shards
    assert sum(place.rows for place in report.places) == 3
    assert holders(data, GONE, rows) == set()
    assert forget(data, "user", GONE).not_found == report.ids
    with ServerProcesses(tmp_path, shards, *options) as processes:
        ids, found = has_rows(processes)
        assert ids == KEPT
        assert_equal(found, expected)
        assert RecStoreClient().stats("user")["step"] == 3
        train(processes, steps=1)


@pytest.mark.tier("test")
def test_servers_that_run_forget_and_their_logs_too(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcesses(tmp_path, 2, "--data", str(data), "--durability", "wal") as processes:
        rows = train(processes)
        _, expected = has_rows(processes)
        servers.set_ps_backend("embedded")
        told = run_recstore(
            *("forget", "--servers", ",".join(processes.addresses), "--table", "user"),
            *("--ids", ",".join(map(str, [*GONE.tolist(), 7])), "--scan", data, "--dry-run"),
        )
        assert told.returncode == 1, "the log has them"
        assert 'table "user"' in told.stdout
        assert "not found: 7" in told.stdout
        report = forget(table="user", ids=GONE, servers=processes.addresses, scan=[data])
        [place] = report.places
        assert (place.kind, place.rows, report.not_found) == ("servers", 3, ())
        assert place.bytes > 0
        assert report.is_forgotten, report.remaining
        assert holders(data, GONE, rows) == set()
        ids, found = has_rows(processes)
        assert ids == KEPT
        assert_equal(found, expected)
        with pytest.raises(ValueError, match='the servers have no table "none", but user'):
            forget(table="none", ids=GONE, servers=processes.addresses)


def test_servers_without_a_directory_forget_in_their_memory(tmp_path: Path) -> None:
    with ServerProcesses(tmp_path, 2) as processes:
        train(processes)
        report = forget(table="user", ids=GONE, servers=processes.addresses)
        assert (report.places[0].rows, report.places[0].bytes, report.is_forgotten) == (3, 0, True)
        assert has_rows(processes)[0] == KEPT


def test_an_id_that_a_table_cannot_have_is_not_found(tmp_path: Path) -> None:
    with ServerProcesses(tmp_path, 1) as processes:
        servers.set_ps_servers(processes.addresses)
        RecStoreClient().init_data("few", (3, 2), torch.float32)
        report = forget(table="few", ids=[5, -1], servers=processes.addresses)
        assert report.not_found == (-1, 5)


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1"):
        forget(table="user", ids=[7], servers=["127.0.0.1:1"], timeout=0.5)


def test_a_token_and_a_hash_method_that_are_not_the_servers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    with ServerProcesses(tmp_path, 1, "--token-file", str(tmp_path / "token")) as processes:
        servers.set_ps_servers(processes.addresses, token="secret")
        RecStoreClient().init_data("few", (3, 2), torch.float32)
        told = run_recstore("forget", "--servers", processes.addresses[0], "--table", "few", "--ids", "1")
        assert (told.returncode, "token" in told.stderr) == (2, True), told.stderr
        options = ("--servers", processes.addresses[0], "--table", "few", "--ids", "1")
        told = run_recstore("forget", *options, "--token-file", tmp_path / "token")
        assert (told.returncode, told.stdout.splitlines()[-1]) == (0, "1 ids are forgotten"), told.stderr
        with pytest.raises((ConnectionError, RuntimeError), match="city_hash"):
            forget(table="few", ids=[1], servers=processes.addresses, token="secret", hash_method="simple_mod")


def test_a_copy_of_another_server_is_refused(tmp_path: Path) -> None:
    leading, following = tmp_path / "leading", tmp_path / "following"
    logged = ("--durability", "wal")
    with ServerProcesses(tmp_path, 1, "--data", str(leading), *logged) as processes:
        rows = train(processes)
        port = processes.addresses[0]
        follower = WarmRecstore("serve", "--port", 0, "--data", following, *logged, "--follow", port, "--synchronous")
        try:
            assert f"follows {port}" in follower.stdout.readline()
            _wait_for(lambda: holders(following, GONE[:1]) != set())
            report = forget(table="user", ids=GONE, servers=processes.addresses, scan=[leading])
            assert report.is_forgotten
            _wait_for(lambda: (following / "shard-0-of-1" / "recstore-shard.json").exists())
        finally:
            follower.send_signal(signal.SIGTERM)
            follower.communicate()
        assert holders(following, GONE, rows) == set(), "it has saved at its end"
        with pytest.raises(ValueError, match=f"it is a copy of the shard at {port}: forget there"):
            forget(following, "user", GONE)
    told = following / "shard-0-of-1" / "recstore-shard.json"
    told.write_text(json.dumps({**json.loads(told.read_text()), "standing": {"role": "demoted", "epoch": 1}}))
    with pytest.raises(ValueError, match="another server leads its shard"):
        forget(following, "user", GONE)


def test_a_follower_copies_the_tables_of_a_leader_that_forgot_while_it_was_down(tmp_path: Path) -> None:
    leading, following = tmp_path / "leading", tmp_path / "following"
    logged = ("--durability", "wal")
    with ServerProcesses(tmp_path, 1, "--data", str(leading), *logged) as processes:
        rows = train(processes)
        port = processes.addresses[0]
        follower = WarmRecstore("serve", "--port", 0, "--data", following, *logged, "--follow", port)
        follower.stdout.readline()
        _wait_for(lambda: holders(following, GONE[:1]) != set())
        processes.stop()
        report = forget(leading, "user", GONE)
        assert report.is_forgotten
        processes.processes[0] = processes._start(0, "--port", port.rsplit(":", 1)[1])
        processes._started(processes.processes[0])
        try:
            _wait_for(lambda: holders(following, GONE, rows) == set())
        finally:
            follower.send_signal(signal.SIGTERM)
            follower.communicate()


def _wait_for(condition: object, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ["checkpoint", "server"])
def test_a_call_that_is_killed_leaves_all_or_nothing(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "server":
        with ServerProcesses(tmp_path, 1, "--data", str(place), "--durability", "wal") as processes:
            train(processes)
    else:
        _save(place)
    content, ids = files(place), ",".join(map(str, GONE.tolist()))
    run_recstore("forget", "--help")  # The first process takes longer.
    began = time.monotonic()
    run_recstore("forget", place, "--table", "user", "--ids", ids)
    seconds, outcomes = time.monotonic() - began, []
    for part in range(12):
        _restore(place, content)
        process = WarmRecstore("forget", place, "--table", "user", "--ids", ids)
        time.sleep(seconds * (0.4 + 0.05 * part))
        process.kill()
        process.communicate()
        outcomes.append(_ids_in(tmp_path, place, kind))
        assert forget(place, "user", GONE).is_forgotten
        assert holders(place, GONE) == set()
    assert all(found in (IDS.sort().values.tolist(), KEPT) for found in outcomes)


def _save(directory: Path) -> None:
    module = DistEmbedding(None, 8, "user", optimizer={"kind": "adagrad", "lr": 0.1})
    module(IDS).sum().backward()
    SparseOptimizer(modules=[module]).step()
    checkpoint.save(directory)
    drop_all_tables()


def _restore(place: Path, content: dict[str, bytes]) -> None:
    for path in place.rglob("*"):
        if path.is_file():
            path.unlink()
    for name, data in content.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


def _ids_in(folder: Path, place: Path, kind: str) -> list[int]:
    if kind == "server":
        with ServerProcesses(folder, 1, "--data", str(place), "--durability", "wal") as processes:
            servers.set_ps_servers(processes.addresses)
            ids = ids_now()
        servers.set_ps_backend("embedded")
        return ids
    checkpoint.load(place)
    ids = ids_now()
    drop_all_tables()
    return ids
