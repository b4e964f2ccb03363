"""Silent peers at each port of servers with few descriptors: clients, saves and memory stay as they are."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import grpc
import pytest
import torch
from served_models import call, pairs, pairs_body
from silent_peers import SilentPeers, slowest_of_windows

from recstore_ops import RecStoreClient, Table, TableConfig, servers

pytestmark = pytest.mark.tier("test")

IDS = torch.tensor([[1, 2], [3, 4]])
# The ports themselves answer within some milliseconds. This is for machines whose processors are shared with the peers
# of the test and with other tests.
LONGEST = 0.5
ROOM = 64 << 20


@pytest.fixture(autouse=True)
def _embedded_afterwards() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


class LimitedProcess:
    """`recstore ARGUMENTS` that may have few descriptors, ended with the block.

    Attributes:
        addresses: by the names of ports, `main` first.
        told: what it wrote to its error stream, once it has ended.
    """

    def __init__(self, descriptors: int, *arguments: object) -> None:
        command = [sys.executable, "-m", "recstore_ops", *map(str, arguments)]
        limited = f'ulimit -Sn {descriptors // 2}; ulimit -Hn {descriptors}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", limited, "bash", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        patterns = {
            "main": r" at (?:http://)?(127\.0\.0\.1:\d+)",
            "grpc": r"gRPC at (127\.0\.0\.1:\d+)",
            "health": r"health at (?:http://)?(127\.0\.0\.1:\d+)",
            "metrics": r"metrics at http://(127\.0\.0\.1:\d+)",
        }
        found = {name: re.search(pattern, line) for name, pattern in patterns.items()}
        if not all(found.values()):
            self.process.kill()
            assert self.process.stderr is not None
            raise AssertionError(line + self.process.stderr.read())
        self.addresses = {name: each[1] for name, each in found.items() if each}
        self.told = ""

    @property
    def resident_bytes(self) -> int:
        """The memory that the process has, as the system counts it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found, status
        return int(found[1]) * 1024

    def metrics(self) -> str:
        """The text of its metrics."""
        connection = http.client.HTTPConnection(self.addresses["metrics"], timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def closed(self, port: str) -> float:
        """How many peers of a port were refused or closed."""
        lines = [line for line in self.metrics().splitlines() if "refused_connections_total{" in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines if f'port="{port}"' in line)

    def __enter__(self) -> LimitedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        _, self.told = self.process.communicate(timeout=60)
        if error is None:
            assert self.process.returncode == 0, self.told


def is_healthy(address: str) -> None:
    """Asks for health over gRPC by a connection of its own."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30, wait_for_ready=True)
        assert answer == b"\x08\x01"


def assert_stands(
    server: LimitedProcess,
    port: str,
    count: int,
    ask: Callable[[], object],
    rarely: Callable[[], object],
    seconds: float,
) -> None:
    """Asks while silent peers come to a port, and does something else while they are there."""
    before = server.resident_bytes
    name = {"main": "bulk"}.get(port, port)
    with SilentPeers(server.addresses[port], count) as peers:
        slowest = slowest_of_windows(ask, seconds)
        peers.opened()
        rarely()
        grown = server.resident_bytes - before
        assert slowest < LONGEST, f"{port}: {slowest * 1000:.1f} ms"
        assert grown < ROOM, f"{port}: {grown / 2**20:.1f} MiB"
    print(f"{name}: p99 {slowest * 1000:.2f} ms, memory {grown / 2**20:+.1f} MiB")


def parameter_server_stands(tmp_path: Path, count: int, seconds: float, descriptors: int, *options: object) -> str:
    """Attacks each port of a parameter server in turn, and returns what it wrote."""
    ports = ("--grpc-port", 0, "--health-port", 0, "--metrics-port", 0)
    arguments = ("--port", 0, "--data", tmp_path / "data", "--durability", "wal", *ports)
    with LimitedProcess(descriptors, "serve", *arguments, "--log-level", "info", *options) as server:
        servers.set_ps_servers([server.addresses["main"]])
        client, ids = RecStoreClient(), torch.arange(100)
        Table("kept", 8, TableConfig())
        client.push("kept", ids, torch.ones(100, 8))
        saves = iter(range(100))

        def save() -> None:
            client.save(str(tmp_path / f"checkpoint-{next(saves)}"))
            is_healthy(server.addresses["health"])
            is_healthy(server.addresses["grpc"])

        for port, name in (("main", "bulk"), ("grpc", "grpc"), ("health", "health"), ("metrics", "metrics")):
            assert_stands(server, port, count, lambda: client.pull("kept", ids), save, seconds)
            assert server.closed(name) > 0
        assert client.pull("kept", ids).eq(1).all()
    return server.told


def model_server_stands(bundle: Path, count: int, seconds: float, descriptors: int, *options: object) -> str:
    """Attacks each port of a model's server in turn, and returns what it wrote."""
    ports = ("--port", 0, "--grpc-port", 0, "--health-port", 0, "--metrics-port", 0)
    with (
        LimitedProcess(descriptors, "serve-model", bundle, *ports, "--log-level", "info", *options) as server,
        ExitStack() as stack,
    ):
        connection = http.client.HTTPConnection(server.addresses["main"], timeout=60)
        stack.callback(connection.close)
        body = pairs_body(IDS)

        def infer() -> None:
            connection.request("POST", f"/v2/models/{bundle.name}/infer", body)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (200, True)

        def all_answer() -> None:
            for port in ("main", "health"):
                asking = http.client.HTTPConnection(server.addresses[port], timeout=60)
                asking.request("GET", "/v2/health/ready")
                assert asking.getresponse().read() == b'{"ready": true}'
                asking.close()
            with grpc.insecure_channel(server.addresses["grpc"]) as channel:
                assert call(channel, "ServerReady").ready

        for port, name in (("main", "http"), ("grpc", "grpc"), ("health", "health"), ("metrics", "metrics")):
            assert_stands(server, port, count, infer, all_answer, seconds)
            assert server.closed(name) > 0
    return server.told


def test_silent_peers_beyond_the_limit_of_a_server(tmp_path: Path) -> None:
    told = parameter_server_stands(tmp_path, 300, 1.0, 2048, "--max-connections", 64)
    assert "limit of descriptors before=1024 now=2048" in told
    assert "limit of connections max_connections=64 all_ports=1536" in told
    assert len([line for line in told.splitlines() if " WARN " in line]) < 60


def test_silent_peers_beyond_the_limit_of_a_models_server(tmp_path: Path) -> None:
    told = model_server_stands(pairs(tmp_path / "pairs", "ports"), 300, 1.0, 2048, "--max-connections", 64)
    assert "limit of descriptors before=1024 now=2048" in told


@pytest.mark.tier("all")
def test_two_thousand_silent_peers_at_each_port_of_a_server_with_few_descriptors(tmp_path: Path) -> None:
    told = parameter_server_stands(tmp_path, 2000, 8.0, 1024)
    assert re.search("WARN .*have fewer connections than each may have: raise the limit of open files", told), told
    assert "all_ports=768" in told


@pytest.mark.tier("all")
def test_two_thousand_silent_peers_at_each_port_of_a_models_server(tmp_path: Path) -> None:
    model_server_stands(pairs(tmp_path / "pairs", "ports_all"), 2000, 8.0, 1024)


@pytest.mark.tier("all")
def test_a_connection_takes_one_descriptor(tmp_path: Path) -> None:
    ports = ("--grpc-port", 0, "--health-port", 0, "--metrics-port", 0)
    with LimitedProcess(1024, "serve", "--port", 0, *ports) as server, ExitStack() as stack:
        host, port = server.addresses["main"].split(":")
        descriptors = Path(f"/proc/{server.process.pid}/fd")
        before = len(list(descriptors.iterdir()))
        # Each of these has said who it is, and asks.
        greeting = b"RECSTORE" + bytes([1, 0, 1, 0]) + bytes(4) + bytes([7] * 16)
        for _ in range(600):
            peer = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            peer.sendall(greeting)
            assert peer.recv(8) == b"RECSTORE"
        assert len(list(descriptors.iterdir())) - before == 600
        servers.set_ps_servers([server.addresses["main"]])
        Table("kept", 8, TableConfig())
        RecStoreClient().save(str(tmp_path / "checkpoint"))


def load(address: str, path: str, ends: threading.Event) -> None:
    """Sends large requests in JSON, one after another."""
    connection = http.client.HTTPConnection(address, timeout=120)
    body = json.dumps({"inputs": [[]] * 500_000}).encode()
    while not ends.is_set():
        connection.request("POST", path, body)
        assert connection.getresponse().read()


@pytest.mark.tier("all")
def test_health_does_not_wait_for_the_json_of_others(tmp_path: Path) -> None:
    bundle = pairs(tmp_path / "pairs", "ports_health")
    ports = ("--port", 0, "--grpc-port", 0, "--health-port", 0, "--metrics-port", 0)
    with LimitedProcess(1024, "serve-model", bundle, *ports) as server:
        ends = threading.Event()
        arguments = (server.addresses["main"], "/v2/models/pairs/infer", ends)
        loads = [threading.Thread(target=load, args=arguments) for _ in range(8)]
        for each in loads:
            each.start()
        time.sleep(1)
        for port in ("main", "health"):
            asking = http.client.HTTPConnection(server.addresses[port], timeout=60)

            def ask(asking: http.client.HTTPConnection = asking) -> None:
                asking.request("GET", "/v2/health/ready")
                assert asking.getresponse().read() == b'{"ready": true}'

            slowest = slowest_of_windows(ask, 8.0)
            print(f"{port}: p99 {slowest * 1000:.2f} ms")
            assert slowest < LONGEST, f"{port}: {slowest * 1000:.1f} ms"
            asking.close()
        ends.set()
        for each in loads:
            each.join()
