"""`recstore serve --follow` and `recstore promote`: who leads a shard, and what each option refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from served_tables import ServerProcesses
from warm_recstore import run_recstore

from recstore_ops import DistEmbedding, EmbeddingTableConfig, RecStoreClient, SparseOptimizer, servers
from recstore_ops.config.config_file import load_config_file
from recstore_ops.servers.server_config import known_servers

pytestmark = pytest.mark.tier("test")

IDS = torch.arange(100)
ROWS = torch.arange(200.0).view(100, 2)


@pytest.fixture(autouse=True)
def _embedded_again() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


def logged(folder: Path, name: str, *options: str) -> ServerProcesses:
    """A server with a log in a folder of its own."""
    own = folder / name
    own.mkdir(exist_ok=True)
    return ServerProcesses(own, 1, "--data", str(own), "--durability", "wal", "--metrics-port", "0", *options)


def wait_until_followed(leader: ServerProcesses) -> None:
    """Waits until a follower has all changes of a leader on its disk, and changes wait for it."""
    until = time.monotonic() + 30
    while not in_step(metrics(leader)):
        assert time.monotonic() < until, metrics(leader)
        time.sleep(0.01)


def in_step(text: str) -> bool:
    """Whether a server's metrics say that changes wait for a follower."""
    return any(line.startswith("recstore_follower_in_step{") and line.endswith(" 1") for line in text.splitlines())


def metrics(processes: ServerProcesses) -> str:
    with urlopen(f"http://{processes.metrics[0]}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_training_goes_on_at_a_follower(tmp_path: Path) -> None:
    with (
        logged(tmp_path, "first") as leader,
        logged(tmp_path, "second", "--follow", leader.addresses[0], "--synchronous") as follower,
    ):
        both = f"{leader.addresses[0]}|{follower.addresses[0]}"
        servers.set_ps_servers([both])
        table = DistEmbedding(None, 2, "user", optimizer={"kind": "sgd", "lr": 1.0}, initializer="zeros")
        steps = SparseOptimizer(modules=[table])
        for _ in range(3):
            table(IDS).sum().backward()
            steps.step()
        wait_until_followed(leader)
        table(IDS).sum().backward()
        leader.processes[0].kill()
        done = run_recstore("promote", follower.addresses[0])
        assert done.returncode == 0, done.stderr
        assert f"shard 0 of 1 is led by {follower.addresses[0]} from change " in done.stdout
        steps.step()
        assert torch.equal(table(IDS), torch.full((100, 2), -4.0))
        again = run_recstore("promote", follower.addresses[0])
        assert again.returncode == 2
        assert "only a server that follows another one is promoted: it leads its shard in epoch 1" in again.stderr


def test_a_leader_logs_that_a_synchronous_follower_is_gone(tmp_path: Path) -> None:
    with (
        logged(tmp_path, "first") as leader,
        logged(tmp_path, "second", "--follow", leader.addresses[0], "--synchronous") as follower,
    ):
        wait_until_followed(leader)
        follower.processes[0].kill()
        until = time.monotonic() + 30
        while in_step(metrics(leader)):
            assert time.monotonic() < until, metrics(leader)
            time.sleep(0.01)
        told = leader.stop()[0]
        assert 'what="its connection ended: changes wait for it no more"' in told


def test_a_server_that_was_demoted_says_so_and_follows(tmp_path: Path) -> None:
    with (
        logged(tmp_path, "first") as leader,
        logged(tmp_path, "second", "--follow", leader.addresses[0]) as follower,
    ):
        servers.set_ps_servers([f"{leader.addresses[0]}|{follower.addresses[0]}"])
        client = RecStoreClient()
        client.init_embedding_table("user", EmbeddingTableConfig(None, 2, optimizer="sgd"))
        client.push("user", IDS, ROWS)
        with pytest.raises(ConnectionError, match=r"it follows the server at .* until it is promoted"):
            servers.set_ps_servers([follower.addresses[0]], timeout=0.3)
        assert run_recstore("promote", follower.addresses[0]).returncode == 0
        assert torch.equal(client.pull("user", IDS), ROWS)
        with pytest.raises(ConnectionError, match="another server leads its shard since epoch 1"):
            servers.set_ps_servers([leader.addresses[0]], timeout=0.3)
        leader.stop()
        data = ("--data", str(tmp_path / "first"), "--durability", "wal")
        refused = run_recstore("serve", "--port", "0", *data)
        assert refused.returncode == 2
        assert "another server leads its shard since epoch 1: start it anew with --follow" in refused.stderr
        with logged(tmp_path, "first", "--follow", follower.addresses[0], "--synchronous") as back:
            wait_until_followed(follower)
            client.push("user", IDS, 2 * ROWS)
            follower.stop()
            assert run_recstore("promote", back.addresses[0]).returncode == 0
            servers.set_ps_servers(back.addresses)
            assert torch.equal(RecStoreClient().pull("user", IDS), 2 * ROWS)


def test_a_copy_is_not_served_as_if_it_led(tmp_path: Path) -> None:
    with logged(tmp_path, "first") as leader, logged(tmp_path, "second", "--follow", leader.addresses[0]) as follower:
        follower.stop()
    done = run_recstore("serve", "--port", "0", "--data", str(tmp_path / "second"), "--durability", "wal")
    assert done.returncode == 2
    assert f"it is a copy of the shard at {leader.addresses[0]}: serve it with --follow" in done.stderr


def test_a_follower_without_its_leaders_tables_is_not_promoted(tmp_path: Path) -> None:
    with logged(tmp_path, "second", "--follow", "127.0.0.1:1") as follower:
        done = run_recstore("promote", follower.addresses[0])
    assert done.returncode == 2
    assert "it has not copied the tables of the server that it follows yet" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--follow", "127.0.0.1:15000"], "--follow needs --durability wal and --data"),
        (["--follow", "15000"], '--follow takes "host:port", the bulk port of a server, got "15000"'),
        (["--synchronous"], "--synchronous goes with --follow"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], message: str) -> None:
    done = run_recstore("serve", "--port", "0", *options)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], 'the server must be "host:port", got "nowhere"'),
        (["127.0.0.1:1"], "promote: shard 0 at 127.0.0.1:1 is unavailable"),
        (["127.0.0.1:1", "--tls-key", "k"], "need --tls-ca"),
    ],
)
def test_a_promotion_that_cannot_be_names_the_reason(arguments: list[str], message: str) -> None:
    done = run_recstore("promote", *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert message in done.stderr


def test_a_server_that_keeps_no_log_is_not_followed_nor_promoted(tmp_path: Path) -> None:
    with ServerProcesses(tmp_path, 1) as leader:
        done = run_recstore("promote", leader.addresses[0])
        assert done.returncode == 2
        assert "only a server that follows another one is promoted" in done.stderr


def test_the_configuration_file_names_replicas(tmp_path: Path) -> None:
    path = tmp_path / "recstore_config.json"
    server = {"port": 15000, "shard": 0, "replicas": ["10.0.0.2:15000", "[::1]:15001"]}
    path.write_text(json.dumps({"distributed_client": {"servers": [server]}}))
    known = known_servers(load_config_file(path))
    assert known is not None
    assert [address.all_servers for address in known.servers] == ["127.0.0.1:15000|10.0.0.2:15000|[::1]:15001"]
    with pytest.raises(ValueError, match=r'server 0 must be "host:port".* got "elsewhere"'):
        servers.set_ps_servers(["127.0.0.1:15000|elsewhere"])
