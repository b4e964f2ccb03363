"""What servers tell of themselves: metrics, log lines, `recstore top`, and where they are told how to be served."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from served_tables import ServerProcesses
from warm_recstore import WarmRecstore, run_recstore

from recstore_ops import DistEmbedding, SparseOptimizer, servers
from recstore_ops.cli.top import TableFigures, metrics_addresses, quantile, shard_figures
from recstore_ops.servers.metrics_text import NoMetrics, Scrape, fetch, parse
from recstore_ops.servers.serve_settings import Durability, LogLevel, ServeSettings, load_served_file, serve_settings
from recstore_ops.servers.server_config import ServerAddress, served_shards
from recstore_ops.servers.workers import Combine, Consistency, WorkerSync

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"
NAME = re.compile(r"\brecstore_[a-z_]+")


@pytest.fixture(autouse=True)
def _embedded_afterwards() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    """Two shards with all that can be told: a log, a checkpoint, a table that was trained."""
    folder = tmp_path_factory.mktemp("servers")
    options = ("--metrics-port", "0", "--data", str(folder / "data"), "--durability", "wal", "--checkpoint-every", "1")
    with ServerProcesses(folder, 2, *options) as running:
        servers.set_ps_servers(running.addresses)
        module = DistEmbedding(None, 4, "told", optimizer="adagrad")
        for _ in range(3):
            module(torch.arange(100)).square().sum().backward()
            SparseOptimizer(modules=[module]).step()
        servers.set_ps_backend("embedded")
        while not all(_has_checkpoint(address) for address in running.metrics):
            time.sleep(0.1)
        yield running


@pytest.fixture(scope="module")
def told(processes: ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all samples: of a shard, and of one that is followed and its follower."""
    folders = [tmp_path_factory.mktemp(name) for name in ("leader", "follower")]
    options = [("--metrics-port", "0", "--data", str(folder), "--durability", "wal") for folder in folders]
    with (
        ServerProcesses(folders[0], 1, *options[0]) as leader,
        ServerProcesses(folders[1], 1, *options[1], "--follow", leader.addresses[0]) as follower,
    ):
        while not fetch(leader.metrics[0]).of("recstore_follower_in_step"):
            time.sleep(0.01)
        addresses = (processes.metrics[0], leader.metrics[0], follower.metrics[0])
        return {name for address in addresses for name in fetch(address).samples}


def _has_checkpoint(address: str) -> bool:
    return bool(fetch(address).of("recstore_last_checkpoint_timestamp_seconds"))


def base(name: str) -> str:
    """The metric that a sample's name belongs to."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_training_is_told(processes: ServerProcesses) -> None:
    scrapes = [fetch(address) for address in processes.metrics]
    assert sum(scrape.total("recstore_table_rows") for scrape in scrapes) == 100
    for shard, scrape in enumerate(scrapes):
        updates = [sample for sample in scrape.of("recstore_requests_total") if sample.labels["verb"] == "update"]
        counted = {sample.labels["outcome"]: sample.value for sample in updates}
        assert counted == {"ok": 3, "refused": 0, "panicked": 0}
        assert {sample.labels["shard"] for samples in scrape.samples.values() for sample in samples} == {str(shard)}


def test_every_metric_is_documented_and_every_documented_one_is_told(told: set[str]) -> None:
    documented = set(re.findall(r"^\| `(recstore_[a-z_]+)` ", OPERATIONS.read_text("utf-8"), flags=re.MULTILINE))
    assert documented == {base(name) for name in told}


def test_the_dashboard_asks_for_metrics_that_are_told(told: set[str]) -> None:
    dashboard = json.loads((ROOT / "dashboards" / "recstore.json").read_text("utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    names = {name for expression in asked for name in NAME.findall(expression)}
    assert names <= told
    assert {base(name) for name in names} == {base(name) for name in told}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_top_shows_shards_and_tables_and_which_are_down(processes: ServerProcesses) -> None:
    nobody = free_address()
    shown = run_recstore("top", *processes.metrics, nobody, processes.addresses[0], "--once", "--interval", "0.2")
    assert shown.returncode == 1, shown.stderr
    lines = shown.stdout.splitlines()
    for shard, address in enumerate(processes.metrics):
        assert any(re.search(rf"^\s*{shard}\s+{address}\s+\d+\.\d+\.\d+\s+\d", line) for line in lines), shown.stdout
    assert any(nobody in line and "down: [Errno 111]" in line for line in lines), shown.stdout
    assert any(processes.addresses[0] in line and "down: " in line for line in lines), shown.stdout
    assert any(re.search(r"^\s*told\s+100\s+\d+\.\d\d", line) for line in lines), shown.stdout
    assert run_recstore("top", *processes.metrics, "--once", "--interval", "0.1").returncode == 0


def test_top_finds_shards_in_a_configuration_file(processes: ServerProcesses, tmp_path: Path) -> None:
    ports = [int(address.rsplit(":", 1)[1]) for address in processes.metrics]
    entries = [{"port": 0, "shard": shard, "metrics_port": port} for shard, port in enumerate(ports)]
    path = write(tmp_path, {"servers": entries})
    assert metrics_addresses(path) == processes.metrics
    shown = run_recstore("top", "--config", str(path), "--once", "--interval", "0.1")
    assert shown.returncode == 0, shown.stderr
    assert all(address in shown.stdout for address in processes.metrics)
    wide = {"servers": [{"host": "far", "port": 1, "shard": 0}], "metrics_host": "0.0.0.0", "metrics_port": 9}
    assert metrics_addresses(write(tmp_path, wide)) == ["far:9"]
    assert metrics_addresses(write(tmp_path, {**wide, "metrics_host": "::1"})) == ["[::1]:9"]


def test_top_without_servers_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path, {"servers": [{"port": 1, "shard": 0}]}))
    for arguments, message in (
        ((), "recstore top needs either HOST:PORT of servers' metrics, or --config"),
        (("a:1", "--config", path), "recstore top needs either HOST:PORT of servers' metrics, or --config"),
        (("--config", path), "shard 0 has no metrics_port, or 0, which is any that is free"),
    ):
        refused = run_recstore("top", *arguments)
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr


def test_metrics_are_read_as_they_are_written() -> None:
    text = (
        "# HELP a Anything.\n# TYPE a counter\n"
        'a{table="x \\"y\\" \\\\ \\n} 5",shard="0"} 7\na_bucket{le="+Inf"} 1e3\nb 2.5 1700000000\n\n'
    )
    scrape = parse(text)
    assert [dict(sample.labels) for sample in scrape.of("a")] == [{"table": 'x "y" \\ \n} 5', "shard": "0"}]
    assert (scrape.total("a"), scrape.total("a_bucket"), scrape.total("b"), scrape.total("c")) == (7, 1000, 2.5, 0)
    for line in ("<html>", "a seven"):
        with pytest.raises(NoMetrics, match="no line of metrics: "):
            parse(line)


@pytest.mark.parametrize("address", ["127.0.0.1", "a:b", "a b:1", "http://a:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(NoMetrics, match="this is no HOST:PORT"):
        fetch(address)


def test_quantiles_spread_observations_evenly_within_their_class() -> None:
    classes = {0.1: 50.0, 0.2: 90.0, 0.4: 99.0, float("inf"): 100.0}
    assert quantile(0.5, classes) == pytest.approx(0.1)
    assert quantile(0.7, classes) == pytest.approx(0.15)
    assert quantile(0.99, classes) == pytest.approx(0.4)
    assert quantile(0.999, classes) == pytest.approx(0.4)
    assert quantile(0.25, classes) == pytest.approx(0.05)
    assert quantile(0.5, {}) is None
    assert quantile(0.5, dict.fromkeys(classes, 0.0)) is None


def scraped(at: float, requests: int, **others: int) -> Scrape:
    lines = [f"recstore_requests_total {requests}", 'recstore_build_info{shard="2",version="1.2.3"} 1']
    lines += [f'recstore_request_seconds_bucket{{verb="{v}",le="{le}"}} {requests}' for v in "ab" for le in (1, "+Inf")]
    lines += [f"recstore_{name} {value}" for name, value in others.items()]
    lines += ['recstore_table_rows{table="t"} 7', 'recstore_table_bytes{table="t"} 70']
    return Scrape(parse("\n".join(lines)).samples, at)


def test_figures_are_what_happened_between_two_scrapes() -> None:
    before = scraped(10.0, 100, rows_total=1000, received_bytes_total=10, sent_bytes_total=20)
    after = scraped(12.0, 150, rows_total=1500, received_bytes_total=30, sent_bytes_total=60, connections=4)
    figures = shard_figures(before, after)
    assert (figures.shard, figures.version, figures.connections, figures.log_bytes) == ("2", "1.2.3", 4, None)
    assert (figures.requests, figures.rows, figures.bytes, figures.p50) == (25, 250, 30, 0.5)
    assert figures.tables == {"t": TableFigures(7, 70)}
    # A server that was started again counts from 0.
    again = shard_figures(after, scraped(13.0, 5, rows_total=6, log_bytes=8))
    assert (again.requests, again.rows, again.log_bytes, again.p50) == (5, 6, 8, 0.5)
    assert shard_figures(after, Scrape(after.samples, 14.0)).p99 is None


def write(folder: Path, cache_ps: object) -> Path:
    path = folder / "recstore_config.json"
    path.write_text(json.dumps({"cache_ps": cache_ps}))
    return path


def test_what_the_command_line_does_not_say_is_what_the_file_says(tmp_path: Path) -> None:
    said = {"data": "tables", "durability": "wal", "checkpoint_every": 5, "metrics_host": "::1", "max_connections": 9}
    entries = [{"port": 1, "shard": 0}, {"port": 2, "shard": 1, "metrics_port": 7}]
    file = load_served_file(write(tmp_path, {**said, "log_level": "info", "metrics_port": 6, "servers": entries}))
    expected = ServeSettings(tmp_path / "tables", Durability.WAL, 5, "::1", 9, LogLevel.INFO)
    assert serve_settings(file, {"data": None}) == expected
    given = {"data": Path("here"), "durability": Durability.CHECKPOINT, "log_level": LogLevel.OFF}
    settings = serve_settings(file, given)
    assert (settings.data, settings.durability, settings.log_level) == tuple(given.values())
    addresses = ServerAddress("127.0.0.1", 1, 0, 6), ServerAddress("127.0.0.1", 2, 1, 7)
    assert served_shards(file).servers == addresses
    assert serve_settings(None, {}) == ServeSettings()


def test_how_workers_train_together_is_in_the_file_and_on_the_command_line(tmp_path: Path) -> None:
    said = {"workers": 3, "consistency": "bounded", "staleness": 4, "worker_timeout": 2.5}
    file = load_served_file(write(tmp_path, {**said, "servers": [{"port": 1, "shard": 0}]}))
    bounded = WorkerSync(3, Consistency.BOUNDED, Combine.SUM, 4, 2.5)
    assert serve_settings(file, {"workers": None}) == ServeSettings(worker_sync=bounded)
    given = {"workers": 2, "staleness": 5, "heartbeat_timeout": 7.0}
    expected = WorkerSync(2, Consistency.BOUNDED, Combine.SUM, 5, 2.5, 7.0)
    assert serve_settings(file, given) == ServeSettings(worker_sync=expected)


def test_what_is_for_another_consistency_is_refused(tmp_path: Path) -> None:
    file = load_served_file(write(tmp_path, {"staleness": 4, "servers": [{"port": 1, "shard": 0}]}))
    with pytest.raises(ValueError, match="staleness is for the consistency bounded, and this is asynchronous"):
        serve_settings(file, {})
    with pytest.raises(ValueError, match="combine is for the consistency synchronous, and this is bounded"):
        serve_settings(file, {"consistency": Consistency.BOUNDED, "combine": Combine.MEAN})


def read_whole(path: Path) -> tuple[object, object]:
    file = load_served_file(path)
    return served_shards(file), serve_settings(file, {})


@pytest.mark.parametrize(
    ("cache_ps", "message"),
    [
        ({"data": ""}, "cache_ps.data: must not be empty"),
        ({"durability": "raft"}, 'cache_ps.durability: must be one of "checkpoint", "wal", got "raft"'),
        ({"checkpoint_every": 0}, "cache_ps.checkpoint_every: must be at least 1, got 0"),
        ({"metrics_port": 65536}, "cache_ps.metrics_port: must be at most 65535, got 65536"),
        ({"metrics_host": 3}, "cache_ps.metrics_host: must be string, got 3"),
        ({"max_connections": 0}, "cache_ps.max_connections: must be at least 1, got 0"),
        ({"log_level": "loud"}, "cache_ps.log_level: must be one of "),
        ({"durability": "wal"}, "--durability wal needs --data, a directory for tables and log"),
        (
            {"servers": [{"port": 1, "shard": 0, "metrics_port": -1}]},
            r"cache_ps.servers.0.metrics_port: must be at least 0, got -1",
        ),
    ],
)
def test_an_entry_of_the_file_that_is_none_is_refused_by_its_path(
    tmp_path: Path, cache_ps: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, {"servers": [{"port": 1, "shard": 0}], **cache_ps})
    with pytest.raises(ValueError, match=message):
        read_whole(path)


def test_a_port_of_metrics_is_of_one_shard(tmp_path: Path) -> None:
    path = write(tmp_path, {"servers": [{"port": 0, "shard": 0}, {"port": 0, "shard": 1}]})
    refused = run_recstore("serve", "--config", str(path), "--metrics-port", "0")
    assert (refused.returncode, refused.stderr) == (
        2,
        "recstore: --metrics-port is of one shard: choose one with --shard\n",
    )


def served_lines(config: Path, *options: str, peer: bytes = b"") -> tuple[str, str]:
    """Serves until it has answered a peer, and returns both streams."""
    process = WarmRecstore("serve", "--config", config, *options, splits=True)
    try:
        started = process.stdout.readline()
        found = re.match(r"shard 0 of 1 at 127\.0\.0\.1:(\d+)", started)
        assert found, started
        address = ("127.0.0.1", int(found[1]))
        # Who is refused may find the connection reset: what it said was not read to its end.
        with socket.create_connection(address, timeout=30) as connection, suppress(ConnectionResetError):
            connection.sendall(peer)
            while connection.recv(1024):
                pass
        process.send_signal(signal.SIGTERM)
        printed, told = process.communicate(timeout=60)
        assert process.returncode == 0, told
    finally:
        process.kill()
        process.wait()
    return started + printed, told


def test_log_lines_say_what_a_server_does_at_their_level(tmp_path: Path) -> None:
    entries = {"servers": [{"port": 0, "shard": 0, "metrics_port": 0}], "data": "data", "durability": "wal"}
    config, stranger = write(tmp_path, entries), b"GET / HTTP/1.1\r\n\r\n"
    printed, told = served_lines(config, peer=stranger)
    assert re.match(r"shard 0 of 1 at \S+, metrics at http://127\.0\.0\.1:\d+/metrics\nshard 0: saved 0 rows", printed)
    refusal = r'WARN .*peer refused shard=0 port="bulk" peer="127\.0\.0\.1:\d+" why="this is no bulk port'
    assert re.search(refusal, told), told
    assert "INFO" not in told
    told = served_lines(config, "--log-level", "debug", peer=stranger)[1]
    for line in (
        r"INFO .*: recovered shard=0 directory=\S+ changes=0",
        r"INFO .*: serving shard=0 of=1 bulk=127\.0\.0\.1:\d+ grpc=None metrics=Some\(",
        r'DEBUG .*: connection opened shard=0 port="bulk" peer=127',
        r'DEBUG .*: connection closed shard=0 port="bulk" peer=127',
        r"INFO .*: checkpoint shard=0 rows=0 bytes=\d+ seconds=",
        r"INFO .*: stopped shard=0",
    ):
        assert re.search(line, told), told
    assert served_lines(config, "--log-level", "off", peer=stranger)[1] == ""


def test_the_connections_of_a_server_have_a_limit(tmp_path: Path) -> None:
    with ServerProcesses(tmp_path, 1, "--max-connections", "1", "--metrics-port", "0") as running:
        host, port = running.addresses[0].split(":")
        refused = pytest.raises(ConnectionError, match="the server has 1 connections, which is its limit")
        with socket.create_connection((host, int(port)), timeout=30) as busy:
            # It has said who it is, and its request is on its way.
            busy.sendall(b"RECSTORE" + bytes([1, 0, 1, 0]) + bytes(4) + bytes([7] * 16))
            assert busy.recv(8) == b"RECSTORE"
            busy.sendall(b"\x01")
            time.sleep(0.2)
            with refused:
                servers.set_ps_servers(running.addresses, timeout=0.5)
        assert fetch(running.metrics[0]).total("recstore_refused_connections_total") >= 1
