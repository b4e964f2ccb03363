"""Serves a publication over HTTP: its files, and an answer as soon as there is something new."""

from __future__ import annotations

import io
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import suppress
from enum import IntEnum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import SplitResult, parse_qs, urlsplit

from recstore_ops.config.directory import Directory
from recstore_ops.serving.access import Access, accepts, written
from recstore_ops.serving.following.names import CURRENT, is_file_of_a_publication
from recstore_ops.serving.following.publication import current_text
from recstore_ops.serving.following.sources import DirectorySource
from recstore_ops.serving.following.time_limits import BYTES_PER_SECOND, TimeLimit

_log = logging.getLogger("recstore_ops.publish")

_MAX_PEERS = 1024
"""The most peers for which the time of the last warning is remembered."""


class State(IntEnum):
    """The state of a connection. If there are too many connections, those in the lowest state are closed first."""

    SILENT = 0
    """It has not said yet who it is."""
    IDLE = 1
    """It has no request under way."""
    BUSY = 2


class Connection:
    """A connection that was accepted.

    Attributes:
        socket: its own; with TLS another than the one that was accepted.
        peer: the address at the other end.
        state: what it does.
        since: when it began to.
    """

    def __init__(self, accepted: socket.socket, peer: str) -> None:
        self.socket, self.peer = accepted, peer
        self.becomes(State.SILENT)

    def becomes(self, state: State) -> None:
        """Notes what it does from now on."""
        self.state, self.since = state, time.monotonic()

    def cut(self) -> None:
        """Ends it, whatever another thread waits for."""
        with suppress(OSError):
            # To close it here would not wake the thread that waits on it, and would free its number for another
            # connection.
            self.socket.shutdown(socket.SHUT_RDWR)


class Connections:
    """All connections at a time.

    Args:
        limit: how many there may be.

    Attributes:
        refused: how many were refused or closed for bad form, by reason.
    """

    def __init__(self, limit: int) -> None:
        self.refused: Counter[str] = Counter()
        self._limit, self._open = limit, set[Connection]()
        self._warned: dict[str, float] = {}
        self._lock = threading.Lock()

    def admit(self, accepted: socket.socket, peer: str) -> Connection | None:
        """Takes a connection, in the place of the one that has done nothing for longest if there are too many.

        Returns:
            None: all others have requests under way.
        """
        with self._lock:
            if len(self._open) >= self._limit:
                # A peer that holds connections open and says nothing loses these first, and not those of others.
                least = min(self._open, key=lambda each: (each.state, each.since))
                if least.state == State.BUSY:
                    return None
                self._open.remove(least)
                least.cut()
            made = Connection(accepted, peer)
            self._open.add(made)
            return made

    def remove(self, connection: Connection) -> None:
        """Forgets a connection that was closed."""
        with self._lock:
            self._open.discard(connection)

    def cut_all(self) -> None:
        """Ends all connections; what is sent over them is cut off."""
        with self._lock:
            for each in self._open:
                each.cut()

    def refuse(self, peer: str, kind: str, reason: str) -> None:
        """Counts a connection that is refused or closed for bad form, with one warning for each peer and second."""
        now = time.monotonic()
        with self._lock:
            self.refused[kind] += 1
            if now - self._warned.get(peer, -math.inf) < 1.0:
                return
            # Taken out and put back, the peers stay in the order of their warnings: the first one is the oldest.
            self._warned.pop(peer, None)
            if len(self._warned) >= _MAX_PEERS:
                del self._warned[next(iter(self._warned))]
            self._warned[peer] = now
        _log.warning("the publication's port closes a connection of %s: %s", peer, reason)


_HEAD = 5.0
"""Seconds for the head of a request; of the first one, encryption included."""

_IDLE = 600.0
"""Seconds after which a connection without requests is closed."""

_TAKING = 30.0
"""Seconds for a follower to take an answer, and more for a long one."""

_MAX_HEAD_BYTES = 16 << 10
_SILENT = f"it sent no request within {_HEAD:g} s"
_LONGEST_WAIT = 30.0
_MAX_CONNECTIONS = 256
_BYTES_PER_CHUNK = 1 << 18


class PublicationServer:
    """Serves the publication in a directory until it is closed.

    Attributes:
        address: `host:port` at which followers reach it.
        refused_connections: how many were refused or closed for bad form, by reason.

    Args:
        directory: of the publication.
        address: `host:port` to listen at; port 0 takes any that is free.
        access: how followers are let in.

    Raises:
        ValueError: no address, other machines reach it and TLS or the token is missing, or a file of TLS is none.
        OSError: it cannot listen there.
    """

    def __init__(self, directory: Path, address: str, access: Access) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 0xFFFF:
            raise ValueError(f"address must be host:port, got {address!r}")
        resolved = access.check(host.removeprefix("[").removesuffix("]"), int(port))
        self._server = _Server(resolved, int(port), directory, access)
        self.address = written(resolved, self._server.server_address[1])
        self.refused_connections: Counter[str] = self._server.connections.refused
        threading.Thread(target=self._server.serve_forever, name="recstore-publication", daemon=True).start()

    def close(self) -> None:
        """Serves no longer; answers under way are given up."""
        self._server.shutdown()
        self._server.server_close()
        self._server.connections.cut_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, directory: Path, access: Access) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.directory, self.token, self._context = directory, access.token, access.ssl_context()
        self.connections = Connections(_MAX_CONNECTIONS)
        self._accepted: dict[Any, Connection] = {}
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection a thread of its own, if it is not one too many."""
        connection = self.connections.admit(request, client_address[0])
        if connection is None:
            self.connections.refuse(client_address[0], "limit", f"all {_MAX_CONNECTIONS} have requests under way")
            self.shutdown_request(request)
        else:
            self._accepted[request] = connection
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers on a connection, encrypted if a certificate was given."""
        connection = self._accepted.pop(request)
        try:
            limit = TimeLimit(_HEAD)
            if self._context is not None:
                self._encrypt(self._context, connection, limit)
            _Handler(connection, limit, self)
        except _RefusedError as error:
            self.connections.refuse(connection.peer, error.kind, str(error))
        except OSError:
            pass  # The follower left.
        finally:
            self.shutdown_request(connection.socket)
            self.connections.remove(connection)

    def _encrypt(self, context: ssl.SSLContext, connection: Connection, limit: TimeLimit) -> None:
        """Makes a connection an encrypted one.

        Raises:
            _RefusedError: the peer speaks no TLS, or not in time.
        """
        accepted = connection.socket
        # The handshake is this thread's, below, within the time of the first head. A slow peer holds up no other.
        connection.socket = encrypted = context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        try:
            encrypted.settimeout(limit.left())
            encrypted.do_handshake()
        except TimeoutError:
            raise _RefusedError("silent", _SILENT) from None
        except ssl.SSLError as error:
            raise _RefusedError("form", f"it speaks no TLS that this server knows: {error.reason}") from None


class _RefusedError(OSError):
    """A connection is closed for bad form, of a kind."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class _Requests(io.RawIOBase):
    """The requests of a connection, each of which must come in time."""

    def __init__(self, connection: Connection, first: TimeLimit) -> None:
        self._connection, self._limit = connection, first
        self._raw = connection.socket.makefile("rb", buffering=0)
        self._head_bytes = 0

    def begin_next(self) -> None:
        """A request was answered; the next one may come later."""
        self._limit, self._head_bytes = TimeLimit(_IDLE), 0
        self._connection.becomes(State.IDLE)

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """See `io.RawIOBase`.

        Raises:
            _RefusedError: a request has begun, or should have, and is too slow or too large.
        """
        is_idle = self._connection.state == State.IDLE and not self._head_bytes
        try:
            # Each read has the rest of one limit: a peer that sends byte by byte gains no time.
            self._connection.socket.settimeout(self._limit.left())
            count = self._raw.readinto(buffer)
        except TimeoutError:
            if is_idle:
                # The end of the stream to `http.server`, which then closes without a word.
                return 0
            raise _RefusedError("silent", _SILENT) from None
        if is_idle:
            self._limit = TimeLimit(_HEAD)
        self._head_bytes += count or 0
        if self._head_bytes > _MAX_HEAD_BYTES:
            raise _RefusedError("form", f"the head of its request has more than {_MAX_HEAD_BYTES} bytes")
        return count

    def close(self) -> None:
        """See `io.RawIOBase`."""
        self._raw.close()
        super().close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rbufsize = 4096

    def __init__(self, connection: Connection, first: TimeLimit, server: _Server) -> None:
        self._follower, self._requests, self._of = connection, _Requests(connection, first), server
        super().__init__(connection.socket, (connection.peer, 0), server)

    def setup(self) -> None:
        """Reads requests in time."""
        super().setup()
        # The reader that `http.server` made waits for each read anew. This one knows the limit of the whole request.
        self.rfile.close()
        self.rfile = io.BufferedReader(self._requests, self.rbufsize)

    def do_GET(self) -> None:
        """Answers a request."""
        if not accepts(self._of.token, self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")):
            self._refuse(HTTPStatus.UNAUTHORIZED, "token", "the token is not the publisher's")
            return
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.BAD_REQUEST, "form", "a request has no body")
            return
        self._follower.becomes(State.BUSY)
        self._answer(urlsplit(self.path))
        self._requests.begin_next()

    def _answer(self, url: SplitResult) -> None:
        name = url.path.removeprefix("/")
        try:
            content = self._current(parse_qs(url.query)) if name == CURRENT else self._opened(name)
        except (FileNotFoundError, ValueError):
            self._say(HTTPStatus.NOT_FOUND, b"there is no such file")
        except OSError as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"{name} cannot be read: {error}".encode("utf-8", "replace"))
        else:
            with content:
                self._send(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses what is no request."""
        self.request_version = self.protocol_version  # Whatever the request says, it is told why.
        self._refuse(HTTPStatus(code), "form", message or HTTPStatus(code).phrase)

    def log_error(self, format: str, *args: Any) -> None:
        """Counts an answer that was not taken in time: `http.server` reports nothing else here."""
        self._of.connections.refuse(self._follower.peer, "slow", "it takes its answer too slowly")

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no line for a request."""

    def _refuse(self, status: HTTPStatus, kind: str, reason: str) -> None:
        """Answers with an error, and closes the connection."""
        self.close_connection = True
        self._of.connections.refuse(self._follower.peer, kind, reason)
        self._say(status, reason.encode("utf-8", "replace"))

    def _current(self, query: dict[str, list[str]]) -> BinaryIO:
        """The text of the publication, once it differs from the one that the follower has seen."""
        wait = max(0.0, min(float(query.get("wait", ["0"])[0]), _LONGEST_WAIT))  # 0 for what is not a number.
        DirectorySource(self._of.directory).wait(query.get("seen", [""])[0], wait)
        return io.BytesIO(current_text(self._of.directory).encode())

    def _opened(self, name: str) -> BinaryIO:
        if not is_file_of_a_publication(name):
            raise FileNotFoundError(name)
        with Directory(self._of.directory) as held:
            return held.open(name)

    def _send(self, content: BinaryIO) -> None:
        left, limit = content.seek(0, os.SEEK_END), TimeLimit(_TAKING, BYTES_PER_SECOND)
        content.seek(0)
        self._begin(HTTPStatus.OK, left)
        while part := content.read(min(left, _BYTES_PER_CHUNK)):
            self.connection.settimeout(limit.left())
            self.wfile.write(part)
            limit.went(len(part))
            left -= len(part)
        # The follower must not wait for what was cut off.
        self.close_connection = self.close_connection or left > 0

    def _say(self, status: HTTPStatus, body: bytes) -> None:
        self._begin(status, len(body))
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, length: int) -> None:
        self.connection.settimeout(_TAKING)
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
