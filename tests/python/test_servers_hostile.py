"""Thousands of peers that break the rules, against a real server: it goes on serving, and its memory stays as it is."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from served_tables import ServerProcesses

from recstore_ops import RecStoreClient, Table, TableConfig, servers

pytestmark = pytest.mark.tier("test")

CONNECTIONS = 10_000
SLOW_PEERS = 300
GREETING_BYTES = 32
# Threads leave something of their stacks and of the allocator's arenas behind, but no more with each peer.
ROOM = 16 << 20


@pytest.fixture(autouse=True)
def _embedded_afterwards() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[ServerProcesses]:
    with ServerProcesses(tmp_path, 1) as processes:
        yield processes


def peer(processes: ServerProcesses) -> socket.socket:
    host, port = processes.addresses[0].rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


def what_a_client_says(processes: ServerProcesses) -> bytes:
    """The bytes of a client's whole conversation: its greeting, a table, rows, steps, and what it asks besides."""
    said = bytearray()

    def pass_on(source: socket.socket, sink: socket.socket, record: bytearray | None) -> None:
        while chunk := source.recv(1 << 16):
            sink.sendall(chunk)
            if record is not None:
                record += chunk
        sink.shutdown(socket.SHUT_WR)

    def relay() -> None:
        client, server = listener.accept()[0], peer(processes)
        threading.Thread(target=pass_on, args=(server, client, None), daemon=True).start()
        pass_on(client, server, said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=relay, daemon=True).start()
        servers.set_ps_servers([f"127.0.0.1:{listener.getsockname()[1]}"])
        client, ids = RecStoreClient(), torch.arange(20)
        Table("said", 4, TableConfig())
        client.push("said", ids, torch.ones(20, 4))
        client.update("said", ids, torch.ones(20, 4))
        client.pull("said", ids)
        client.delete("said", ids[:3])
        client.stats("said")
    return bytes(said)


def spoilt(said: bytes, chance: random.Random) -> bytes:
    """What a client says with a byte changed, something lost, something doubled, noise in it; or noise alone."""
    first, last = sorted(chance.choices(range(len(said)), k=2))
    flipped = bytes([said[first] ^ chance.randrange(1, 256)])
    noise = chance.randbytes(chance.randrange(100))
    forms = [
        said[:first] + flipped + said[first + 1 :],
        said[:last],
        said[:first] + said[last:],
        said[:last] + said[first:],
        said[:first] + noise + said[first:],
        said[:GREETING_BYTES] + noise,
        noise,
    ]
    return chance.choice(forms)


def say(processes: ServerProcesses, spoken: bytes) -> None:
    with peer(processes) as connection:
        try:
            connection.sendall(spoken)
        except (BrokenPipeError, ConnectionResetError):
            return


def assert_serves(processes: ServerProcesses, round_number: int) -> None:
    servers.set_ps_servers(processes.addresses)
    client, ids = RecStoreClient(), torch.arange(100)
    Table("kept", 2, TableConfig())
    client.push("kept", ids, torch.full((100, 2), float(round_number)))
    assert client.pull("kept", ids).eq(round_number).all()


@pytest.mark.tier("all")
def test_ten_thousand_malformed_connections_leave_a_server_as_it_was(processes: ServerProcesses) -> None:
    said, chance = what_a_client_says(processes), random.Random(1)
    assert_serves(processes, 0)
    resident = []
    for round_number in range(10):
        for _ in range(CONNECTIONS // 10):
            say(processes, spoilt(said, chance))
        assert_serves(processes, round_number)
        resident.append(processes.resident_bytes(0))
    assert resident[-1] - resident[1] < ROOM, resident


def test_peers_that_speak_a_byte_now_and_then_hold_nobody_up(processes: ServerProcesses) -> None:
    said = what_a_client_says(processes)
    assert_serves(processes, 0)
    before = processes.resident_bytes(0)
    peers = [peer(processes) for _ in range(SLOW_PEERS)]
    # A third is silent, a third greets half, a third is within its first request.
    for number, connection in enumerate(peers):
        connection.sendall(said[: (0, GREETING_BYTES // 2, GREETING_BYTES + 9)[number % 3]])
    for seconds in range(7):
        started = time.monotonic()
        assert_serves(processes, seconds)
        assert time.monotonic() - started < 30  # Of silent peers, each would hold it up for seconds.
        for number, connection in enumerate(peers):
            if number % 3 == 2:
                connection.sendall(said[GREETING_BYTES + 9 + seconds :][:1])
        time.sleep(1)
    assert processes.resident_bytes(0) - before < ROOM + SLOW_PEERS * (256 << 10)
    for number, connection in enumerate(peers):
        # Who has not greeted after five seconds is told so, and that is the end.
        if number % 3 != 2:
            while connection.recv(1 << 12):
                pass
        connection.close()
    assert_serves(processes, 8)
