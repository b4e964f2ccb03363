"""Publishers over HTTP that answer wrongly, slowly or not at all: each is a problem, and a good one is taken again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from published_sums import IDS, Sums, published

from recstore_ops.serving import FollowingBundle, Publisher, export, load_bundle
from recstore_ops.serving.following import http_source, time_limits
from recstore_ops.serving.following.followed import Follower
from recstore_ops.serving.following.publication import Current
from recstore_ops.serving.following.sources import source_of
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.manifest import Manifest

pytestmark = pytest.mark.tier("test")

Answer = Callable[[socket.socket, bytes], None]


class Peer:
    """Answers requests with the files of a publication, or wrongly for paths with some word.

    Attributes:
        wrong: how it answers wrongly.
        word: in the paths of which it does.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.wrong: Answer | None = None
        self.word = ""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer_all, args=(connection,), daemon=True).start()

    def _answer_all(self, connection: socket.socket) -> None:
        with connection:
            try:
                for path in self._requests(connection):
                    content = (self._directory / path).read_bytes()
                    if self.wrong is not None and self.word in path:
                        self.wrong(connection, content)
                        return
                    connection.sendall(head(len(content)) + content)
                    if path == "current.json":
                        time.sleep(0.01)
            except OSError:
                return

    @staticmethod
    def _requests(connection: socket.socket) -> Iterator[str]:
        with connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"GET /"):
                    yield line.split()[1].decode().removeprefix("/").partition("?")[0]


def head(length: object) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode()


def says(text: bytes) -> Answer:
    return lambda connection, content: connection.sendall(text)


def trickles(begin: bytes, part: bytes = b"x") -> Answer:
    def answer(connection: socket.socket, content: bytes) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(part)
            time.sleep(0.02)

    return answer


def stays_silent(connection: socket.socket, content: bytes) -> None:
    while connection.recv(1):
        time.sleep(0)


WRONG: dict[str, Answer] = {
    "an end": says(b""),
    "no HTTP": says(b"\0\xff garbage\r\n\r\n"),
    "an error": says(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno"),
    "an endless error": trickles(b"HTTP/1.1 500 No\r\n\r\n"),
    "another place": says(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "nothing": says(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "a length of 10^14": says(head(10**14)),
    "a length of 10^400": says(head(10**400)),
    "a length below 0": says(head(-5)),
    "a length that is none": says(head("many")),
    "no length": says(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nsomething"),
    "chunks": says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"),
    "chunks of garbage": says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "a part": lambda connection, content: connection.sendall(head(len(content)) + content[:-1]),
    "other bytes": lambda connection, content: connection.sendall(head(len(content)) + b"\0" * len(content)),
    "headers without end": trickles(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 100),
    "a line without end": trickles(b"HTTP/1.1 200 OK\r\na: ", b"b" * 10_000),
    "Continue without end": trickles(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 10),
    "silence": stays_silent,
    "a slow head": trickles(b"HTTP/1.1 200 OK\r\n"),
    "a slow body": trickles(head(200)),
    "silence within": lambda connection, content: (connection.sendall(head(200) + b"a"), stays_silent(connection, b""))[
        0
    ],
}


@pytest.fixture
def news(table_name: Callable[[], str], tmp_path: Path) -> Iterator[tuple[Sums, Publisher]]:
    model, publisher = published(table_name(), tmp_path / "news", 0)
    with publisher:
        yield model, publisher


@pytest.fixture
def peer(news: tuple[Sums, Publisher]) -> Iterator[Peer]:
    peer = Peer(news[1].directory)
    yield peer
    peer.close()


@contextmanager
def wrong(peer: Peer, answer: Answer, word: str) -> Iterator[None]:
    """Has a peer answer wrongly for some paths, and followers wait for less time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(http_source, "_TIMEOUT", 0.3)
        peer.wrong, peer.word = answer, word
        yield
        peer.wrong = None


def step(model: Sums, publisher: Publisher, number: int) -> None:
    model.write(number)
    publisher.step()
    publisher.flush()


def following(publisher: Publisher, peer: Peer) -> Follower:
    expected = Manifest.read(publisher.directory / Current.read(publisher.directory).base.name)
    return Follower(expected, source_of(peer.address), "mapped", Operators())


@pytest.mark.parametrize("word", ["current", "update"])
def test_wrong_answers_are_problems(word: str, news: tuple[Sums, Publisher], peer: Peer) -> None:
    model, publisher = news
    follower = following(publisher, peer)
    for number, (kind, answer) in enumerate(WRONG.items(), 1):
        step(model, publisher, number)
        with wrong(peer, answer, word):
            begun = time.monotonic()
            follower.look(0.0)
            assert time.monotonic() - begun < 5, kind
        problem = follower.problem
        assert isinstance(problem, (OSError, ValueError)), kind
        assert peer.address in str(problem) or word in str(problem), (kind, problem)
        assert follower.run([IDS])[0].unique().tolist() == [number - 1], kind
        follower.look(0.0)
        assert follower.problem is None, kind
        assert follower.run([IDS])[0].unique().tolist() == [number], kind


@pytest.mark.tier("all")
@pytest.mark.parametrize("word", ["manifest", "graph", "state", "tables/"])
def test_wrong_files_of_a_base_are_refused(word: str, news: tuple[Sums, Publisher], peer: Peer) -> None:
    for answer in WRONG.values():
        with wrong(peer, answer, word), pytest.raises((OSError, ValueError)):
            following(news[1], peer)
        assert following(news[1], peer).run([IDS])[0].unique().tolist() == [0.0]


def test_a_file_larger_than_the_disk_is_refused_by_its_length(news: tuple[Sums, Publisher], peer: Peer) -> None:
    has = r"tables/0\.safetensors has 1000000000000000 bytes, at most [0-9]+ are expected"
    with wrong(peer, says(head(10**15)), "tables/"), pytest.raises(OSError, match=has):
        following(news[1], peer)


def test_a_long_answer_has_to_go_on_at_a_pace(
    news: tuple[Sums, Publisher], peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, publisher = news
    follower = following(publisher, peer)
    step(model, publisher, 1)

    def slow(connection: socket.socket, content: bytes) -> None:
        connection.sendall(head(len(content)))
        for place in range(0, len(content), 400):
            connection.sendall(content[place : place + 400])
            time.sleep(0.02)

    monkeypatch.setattr(http_source, "BYTES_PER_SECOND", 10 * time_limits.BYTES_PER_SECOND)
    with wrong(peer, slow, "update"):
        follower.look(0.0)
    assert "sends too slowly" in str(follower.problem)
    peer.wrong = slow
    follower.look(0.0)
    assert follower.problem is None


@pytest.mark.parametrize("kind", ["silence", "a slow head", "a slow body", "Continue without end"])
def test_closing_does_not_wait_for_a_peer(kind: str, news: tuple[Sums, Publisher], peer: Peer, tmp_path: Path) -> None:
    model, publisher = news
    before = set(threading.enumerate())
    bundle = load_bundle(export(model, (IDS,), tmp_path / "model"), follow=peer.address)
    assert isinstance(bundle, FollowingBundle)
    own = [each for each in threading.enumerate() if each.name == "recstore-follow" and each not in before]
    peer.wrong, peer.word = WRONG[kind], "update"
    step(model, publisher, 1)
    time.sleep(0.1)
    begun = time.monotonic()
    bundle.close()
    assert time.monotonic() - begun < 5
    for thread in own:
        thread.join(20)
    assert own
    assert not any(thread.is_alive() for thread in own), "what was read was cut off"
    assert bundle(IDS).unique().tolist() == [0.0]
