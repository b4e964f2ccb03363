"""`recstore serve --data`, restarted otherwise: the rows are there or the start is refused, and nothing is removed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from served_tables import ServerProcesses
from warm_recstore import WarmRecstore, run_recstore

from recstore_ops import EmbeddingTableConfig, RecStoreClient, checkpoint, servers, table_names

pytestmark = pytest.mark.tier("test")

IDS = torch.arange(1000)
ROWS = torch.arange(2000.0).view(1000, 2)


@pytest.fixture(autouse=True)
def _embedded_again() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


def write_rows(processes: ServerProcesses, hash_method: str = "city_hash") -> None:
    servers.set_ps_servers(processes.addresses, hash_method)
    client = RecStoreClient()
    client.init_embedding_table("user", EmbeddingTableConfig(None, 2, optimizer="sgd"))
    client.push("user", IDS, ROWS)


def assert_has_rows(processes: ServerProcesses, hash_method: str = "city_hash") -> None:
    servers.set_ps_servers(processes.addresses, hash_method)
    assert table_names() == ["user"]
    assert RecStoreClient().stats("user")["rows"] == 1000
    assert torch.equal(RecStoreClient().pull("user", IDS), ROWS)


def trained(folder: Path, data: Path, num_shards: int, *options: str) -> None:
    with ServerProcesses(folder, num_shards, "--data", str(data), *options) as processes:
        write_rows(processes)
        processes.stop()


def refusal(*options: str | Path) -> str:
    done = run_recstore("serve", "--port", "0", *map(str, options))
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def serving(folder: Path, num_shards: int) -> Path:
    """A configuration file of so many shards."""
    shards = [{"host": "127.0.0.1", "port": 0, "shard": shard} for shard in range(num_shards)]
    path = folder / f"{num_shards}.json"
    path.write_text(json.dumps({"cache_ps": {"servers": shards}}))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_number_of_shards_is_refused_and_spread_on_demand(tmp_path: Path) -> None:
    data = tmp_path / "data"
    trained(tmp_path, data, 1)
    before = files(data)
    done = run_recstore("serve", "--config", str(serving(tmp_path, 2)), "--data", str(data))
    assert done.returncode == 2
    assert f"`recstore reshard {data} --shards 2` spreads their rows anew" in done.stderr
    assert files(data) == before
    done = run_recstore("reshard", str(data), "--shards", "2")
    assert done.returncode == 0, done.stderr
    moved = data / "before-reshard-1"
    assert done.stdout == (
        f"{data}: 1,000 rows of 1 shards are on 2 shards now, by city_hash; the shards before are in {moved}\n"
    )
    assert {name: text for name, text in files(moved).items() if name in before} == before
    with ServerProcesses(tmp_path, 2, "--data", str(data)) as processes:
        assert_has_rows(processes)
        processes.stop()
    shards = [json.loads((data / f"shard-{shard}-of-2" / "recstore-shard.json").read_text()) for shard in range(2)]
    assert [shard["facts"]["hash_method"] for shard in shards] == ["city_hash"] * 2


def test_serve_spreads_rows_at_its_start_if_asked_to(tmp_path: Path) -> None:
    data = tmp_path / "data"
    trained(tmp_path, data, 2, "--durability", "wal")
    process = WarmRecstore("serve", "--data", data, "--port", 0, "--reshard")
    assert process.stdout.readline().startswith(f"{data}: 1,000 rows of 2 shards are on 1 shards now, by city_hash; ")
    assert process.stdout.readline().startswith("shard 0 of 1 at ")
    process.send_signal(signal.SIGTERM)
    assert "shard 0: saved 1000 rows" in process.communicate(timeout=60)[0]
    # Once they are as asked for, the option has nothing to do.
    with ServerProcesses(tmp_path, 1, "--data", str(data), "--reshard") as processes:
        assert_has_rows(processes)
    assert "--reshard needs --data" in refusal("--reshard")


def test_durability_changes_either_way_without_losing_a_row(tmp_path: Path) -> None:
    data = tmp_path / "data"
    trained(tmp_path, data, 1)
    for durability in ("wal", "checkpoint", "wal"):
        with ServerProcesses(tmp_path, 1, "--data", str(data), "--durability", durability) as processes:
            assert_has_rows(processes)
            processes.stop()


def test_a_checkpoint_is_not_served_but_spread(tmp_path: Path) -> None:
    saved, data = tmp_path / "saved", tmp_path / "data"
    with ServerProcesses(tmp_path, 1) as processes:
        write_rows(processes)
        RecStoreClient().save(saved)
    before = files(saved)
    assert f"{saved}: it is a checkpoint of tables" in refusal("--data", saved)
    assert files(saved) == before
    done = run_recstore("reshard", str(saved), "--to", str(data), "--shards", "2", "--hash-method", "simple_mod")
    assert done.stdout == f"{data}: 1,000 rows of a checkpoint are on 2 shards now, by simple_mod\n", done.stderr
    with ServerProcesses(tmp_path, 2, "--data", str(data)) as processes:
        assert_has_rows(processes, "simple_mod")


def test_rows_without_their_manifest_are_refused_and_stay(tmp_path: Path) -> None:
    data = tmp_path / "data"
    trained(tmp_path, data, 1)
    shard = data / "shard-0-of-1"
    (shard / "manifest.json").unlink()
    before = files(data)
    for durability in ("checkpoint", "wal"):
        assert "there is no manifest.json here, but a file of rows" in refusal(
            "--data", data, "--durability", durability
        )
    assert files(data) == before


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("checkpoint", "wal"),
        ("wal", "checkpoint"),
        pytest.param("checkpoint", "checkpoint", marks=pytest.mark.tier("all")),
        pytest.param("wal", "wal", marks=pytest.mark.tier("all")),
    ],
)
def test_a_directory_is_served_once(tmp_path: Path, first: str, second: str) -> None:
    data = tmp_path / "data"
    with ServerProcesses(tmp_path, 1, "--data", str(data), "--durability", first) as processes:
        write_rows(processes)
        assert "another server uses the directory" in refusal("--data", data, "--durability", second)
        processes.stop()
    with ServerProcesses(tmp_path, 1, "--data", str(data), "--durability", first) as processes:
        assert_has_rows(processes)


@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
def test_nothing_else_is_saved_to_the_directory_of_a_server(tmp_path: Path, durability: str) -> None:
    data = tmp_path / "data"
    with ServerProcesses(tmp_path, 1, "--data", str(data), "--durability", durability) as processes:
        write_rows(processes)
        processes.stop()
    servers.set_ps_backend("embedded")
    before = files(data)
    shard = data / "shard-0-of-1"
    for place in (shard, shard / "checkpoint"):
        if durability == "wal" or place == shard:
            with pytest.raises(
                RuntimeError, match=r"a server keeps its tables in \S+, and would go on without what was saved"
            ):
                checkpoint.save(place)
    assert files(data) == before


def test_of_two_shards_one_that_cannot_be_saved_is_named_and_the_other_is_saved(tmp_path: Path) -> None:
    data, config = tmp_path / "data", serving(tmp_path, 2)
    with ServerProcesses(tmp_path, 2, "--data", str(data)) as processes:
        write_rows(processes)
        processes.stop()
    broken = data / "shard-0-of-2" / "manifest.new"
    process = WarmRecstore("serve", "--config", config, "--data", data)
    assert process.stdout.readline().startswith("shard 0 of 2 at")
    assert process.stdout.readline().startswith("shard 1 of 2 at")
    broken.mkdir()
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 2, printed
    assert "shard 1: saved" in printed
    assert "recstore: shard 0 was not saved: " in printed
    assert "manifest.new" in printed


def test_a_closed_terminal_saves_as_an_end_does(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcesses(tmp_path, 1, "--data", str(data)) as processes:
        write_rows(processes)
        processes.processes[0].send_signal(signal.SIGHUP)
        assert "saved 1000 rows" in processes.processes[0].communicate(timeout=60)[0]
    with ServerProcesses(tmp_path, 1, "--data", str(data)) as processes:
        assert_has_rows(processes)


def test_clients_that_spread_ids_otherwise_are_refused_when_they_connect(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcesses(tmp_path, 2, "--data", str(data)) as processes:
        write_rows(processes)
        with pytest.raises(
            ConnectionError, match='spreads ids by hash_method "city_hash", and this client by "simple_mod"'
        ):
            servers.set_ps_servers(processes.addresses, "simple_mod")
        processes.stop()
    with ServerProcesses(tmp_path, 2, "--data", str(data)) as processes:
        with pytest.raises(ConnectionError, match='spreads ids by hash_method "city_hash"'):
            servers.set_ps_servers(processes.addresses, "simple_mod")
        assert_has_rows(processes)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.update("user", IDS, torch.ones(1000, 2)),
        lambda client: client.push("user", IDS, ROWS),
        lambda client: client.pull("user", IDS),
        lambda client: client.stats("user"),
        lambda client: client.save("elsewhere"),
    ],
    ids=["update", "push", "pull", "stats", "save"],
)
def test_a_shard_that_came_back_without_its_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[RecStoreClient], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with ServerProcesses(tmp_path, 2) as processes:
        write_rows(processes)
        client = RecStoreClient()
        client.save(tmp_path / "saved")
        processes.kill_and_start_again(1)
        with pytest.raises(RuntimeError, match=r"shard 1 at .* it was started without the rows that it had"):
            call(client)
        client.load(tmp_path / "saved")
        assert_has_rows(processes)
    assert not os.path.exists("elsewhere/manifest.json")
