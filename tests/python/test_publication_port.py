"""The port of a publisher: peers that are silent, slow, too many or no followers do not keep others out."""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from eventually import wait_until
from published_sums import IDS, Sums

from recstore_ops.servers.server_config import Tls
from recstore_ops.serving import Publisher, publish
from recstore_ops.serving.following import publication_server
from recstore_ops.serving.following.publication import Current
from recstore_ops.serving.following.publication_server import Connections, State
from recstore_ops.serving.following.writing_publisher import WritingPublisher

pytestmark = pytest.mark.tier("test")

Served = Callable[..., Publisher]


@pytest.fixture
def served(table_name: Callable[[], str], tmp_path: Path) -> Iterator[Served]:
    publishers = []

    def begin(**options: object) -> Publisher:
        news = tmp_path / "news"
        publishers.append(publish(Sums(table_name()), (IDS,), news, address="127.0.0.1:0", **options))  # type: ignore[arg-type]
        return publishers[-1]

    yield begin
    for publisher in publishers:
        publisher.close()


def connected(publisher: Publisher) -> socket.socket:
    assert publisher.address is not None
    host, port = publisher.address.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def refused(publisher: Publisher) -> dict[str, int]:
    assert isinstance(publisher, WritingPublisher)
    assert publisher._server is not None  # type: ignore[attr-defined]
    return dict(publisher._server.refused_connections)  # type: ignore[attr-defined]


def states(publisher: Publisher) -> list[State]:
    """What the connections of the port do."""
    assert isinstance(publisher, WritingPublisher)
    assert publisher._server is not None  # type: ignore[attr-defined]
    connections = publisher._server._server.connections  # type: ignore[attr-defined]
    return [each.state for each in list(connections._open)]  # type: ignore[attr-defined]


def asks(connection: socket.socket, path: str = "/current.json", more: str = "") -> bytes:
    """The first bytes of the answer to a request."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n{more}\r\n".encode())
    return connection.recv(100)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes within some seconds."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("begun", [b"", b"GET /current.json", b"GET / HTTP/1.1\r\nHost: a\r\n"])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_silent_peers_are_closed(
    begun: bytes, is_encrypted: bool, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_server, "_HEAD", 0.3)
    options: dict[str, object] = {}
    if is_encrypted:
        authority = trustme.CA()
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
        options = {"tls": Tls(tmp_path / "server.pem", tmp_path / "server.pem")}
    publisher = served(**options)
    silent = connected(publisher)
    if is_encrypted and begun:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        silent = context.wrap_socket(silent)
    silent.sendall(begun)
    assert is_closed(silent)
    wait_until(lambda: refused(publisher) == {"silent": 1})


def test_a_peer_that_sends_a_byte_now_and_then_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_server, "_HEAD", 0.3)
    publisher = served()
    slow = connected(publisher)

    def is_cut() -> bool:
        try:
            slow.sendall(b"a")
        except OSError:
            return True
        return False

    wait_until(is_cut)
    wait_until(lambda: refused(publisher) == {"silent": 1})


def test_idle_peers_stay_longer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_server, "_IDLE", 2.0)
    publisher = served()
    idle, begins = connected(publisher), connected(publisher)
    for connection in (idle, begins):
        assert asks(connection).startswith(b"HTTP/1.1 200")
    wait_until(lambda: states(publisher) == [State.IDLE, State.IDLE])
    monkeypatch.setattr(publication_server, "_HEAD", 0.2)
    begins.sendall(b"GET /")
    assert is_closed(begins)
    wait_until(lambda: refused(publisher) == {"silent": 1})
    wait_until(lambda: states(publisher) == [State.IDLE])  # It may be silent for longer.
    assert is_closed(idle)
    wait_until(lambda: states(publisher) == [])
    assert refused(publisher) == {"silent": 1}, "that is no bad form"


def test_a_full_port_closes_who_does_least_for_longest(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_server, "_MAX_CONNECTIONS", 4)
    publisher = served()
    idle = []
    for number in range(1, 3):
        idle.append(connected(publisher))
        assert asks(idle[-1]).startswith(b"HTTP/1.1 200")
        wait_until(lambda number=number: states(publisher).count(State.IDLE) == number)
    tag = Current.read(publisher.directory).tag
    waits, silent = connected(publisher), connected(publisher)
    newcomers = [waits]
    for closed in (silent, *idle):
        newcomers[-1].sendall(f"GET /current.json?seen={tag}&wait=30 HTTP/1.1\r\n\r\n".encode())
        wait_until(lambda: states(publisher).count(State.BUSY) == len(newcomers) and len(states(publisher)) == 4)
        newcomers.append(connected(publisher))
        assert is_closed(closed)
    newcomers[-1].sendall(f"GET /current.json?seen={tag}&wait=30 HTTP/1.1\r\n\r\n".encode())
    wait_until(lambda: states(publisher) == [State.BUSY] * 4)
    assert is_closed(connected(publisher)), "all others have requests under way"
    wait_until(lambda: refused(publisher) == {"limit": 1})
    publisher.close()
    assert is_closed(waits)


def test_an_answer_has_to_be_taken(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_server, "_TAKING", 0.3)
    publisher = served()
    large = publisher.directory / Current.read(publisher.directory).base.name / "tables" / "9.safetensors"
    large.write_bytes(b"\0" * (64 << 20))
    slow = connected(publisher)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert asks(slow, f"/{large.relative_to(publisher.directory)}").startswith(b"HTTP/1.1 200")
    wait_until(lambda: refused(publisher) == {"slow": 1})


@pytest.mark.parametrize(
    ("request_text", "status", "kind"),
    [
        (b"POST /current.json HTTP/1.1\r\n\r\n", 501, "form"),
        (b"\0\1\2\3\r\n\r\n", 400, "form"),
        (b"GET /current.json HTTP/9.9\r\n\r\n", 505, "form"),
        (b"GET /current.json HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 400, "form"),
        (b"GET /current.json HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "form"),
        (b"GET /current.json HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431, "form"),
        (b"GET /current.json HTTP/1.1\r\na: " + b"b" * 40_000, None, "form"),
        (b"GET /" + b"b" * 40_000, None, "form"),
        (b"GET /current.json HTTP/1.1\r\nAuthorization: Bearer other\r\n\r\n", 401, "token"),
    ],
)
def test_what_is_no_request_of_a_follower_is_closed(
    request_text: bytes, status: int | None, kind: str, served: Served
) -> None:
    publisher = served(token="a secret")
    connection = connected(publisher)
    more = b"Authorization: Bearer a secret\r\n"
    line, end, rest = request_text.partition(b"\r\n")
    connection.sendall(line + end + (more if rest and b"other" not in rest else b"") + rest)
    answer = b""
    try:
        while part := connection.recv(1000):
            answer += part
    except ConnectionResetError:
        pass
    assert answer.split(b" ")[1:2] == ([] if status is None else [str(status).encode()]), answer
    wait_until(lambda: refused(publisher) == {kind: 1})
    honest = connected(publisher)
    assert asks(honest, more=more.decode()).startswith(b"HTTP/1.1 200")


def test_a_file_that_is_no_regular_one_is_an_error_of_the_publisher(served: Served) -> None:
    publisher = served()
    said = Current.read(publisher.directory)
    path = publisher.directory / f"updates/{said.update}-{said.base.history}.update"
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert publisher.address is not None
    connection = http.client.HTTPConnection(publisher.address, timeout=20)
    connection.request("GET", f"/{path.relative_to(publisher.directory)}")
    answer = connection.getresponse()
    assert answer.status == 500
    assert b"it is a symbolic link" in answer.read()
    path.unlink()
    path.write_bytes(b"")


def test_there_is_one_warning_a_peer_and_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(publication_server.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(publication_server, "_MAX_PEERS", 10)
    connections = Connections(1)
    with caplog.at_level(logging.WARNING):
        for peer in ("a", "a", "b", "a"):
            connections.refuse(peer, "form", "no request")
        assert len(caplog.records) == 2
        now[0] += 1.0
        connections.refuse("a", "form", "no request")
        assert len(caplog.records) == 3
        for number in range(100):
            connections.refuse(f"peer {number}", "silent", "no request")
    assert connections.refused == {"form": 5, "silent": 100}
    assert len(connections._warned) == 10  # type: ignore[attr-defined]


def test_a_request_under_way_is_never_closed_for_another() -> None:
    connections = Connections(1)
    one, other = socket.socketpair()
    busy = connections.admit(one, "a")
    assert busy is not None
    busy.becomes(State.BUSY)
    assert connections.admit(other, "b") is None
    busy.becomes(State.IDLE)
    assert connections.admit(other, "b") is not None
    one.close()
    other.close()
