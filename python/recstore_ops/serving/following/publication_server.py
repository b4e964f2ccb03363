"""Serves a publication over HTTP: its files, and an answer as soon as there is something new."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from recstore_ops.serving.access import Access, accepts, written
from recstore_ops.serving.following.names import CURRENT
from recstore_ops.serving.following.sources import DirectorySource
from recstore_ops.serving.manifest import is_file_of_a_bundle

_SILENCE = 60.0
"""Seconds that a follower may be silent for."""

_LONGEST_WAIT = 30.0
_MOST_CONNECTIONS = 256
_NAME = re.compile(r"/(updates/\d+-[0-9a-f]{8}\.update|bases/\d+-[0-9a-f]{8}/(.+))")


class PublicationServer:
    """Serves the publication in a directory until it is closed.

    Attributes:
        address: `host:port` at which followers reach it.

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
        threading.Thread(target=self._server.serve_forever, name="recstore-publication", daemon=True).start()

    def close(self) -> None:
        """Serves no longer; answers under way are given up."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, directory: Path, access: Access) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.directory, self.token, self._context = directory, access.token, access.ssl_context()
        self._connections: set[socket.socket] = set()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection a thread of its own, if it is not one too many."""
        if len(self._connections) < _MOST_CONNECTIONS:
            self._connections.add(request)
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def end_connections(self) -> None:
        """Ends all connections; what is sent over them is cut off."""
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers on a connection, encrypted where a certificate was given."""
        connection = request
        try:
            request.settimeout(_SILENCE)
            if self._context is not None:
                request = self._context.wrap_socket(request, server_side=True)
                self._connections.add(request)
            super().process_request_thread(request, client_address)
        except (OSError, ssl.SSLError):
            self.shutdown_request(request)
        finally:
            self._connections -= {connection, request}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of followers that left."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answers a request."""
        if not accepts(self._of.token, self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")):
            self._say(HTTPStatus.UNAUTHORIZED, b"the token is not the publisher's")
            return
        url = urlsplit(self.path)
        try:
            if url.path == f"/{CURRENT}":
                self._say(HTTPStatus.OK, self._current(parse_qs(url.query)))
            else:
                self._send(self._of.directory / self._file(url.path))
        except (FileNotFoundError, ValueError):
            self._say(HTTPStatus.NOT_FOUND, b"there is no such file")

    @property
    def _of(self) -> _Server:
        assert isinstance(self.server, _Server)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no line for a request."""

    def _current(self, query: dict[str, list[str]]) -> bytes:
        """What the publication says, once it is other than what was seen."""
        wait = max(0.0, min(float(query.get("wait", ["0"])[0]), _LONGEST_WAIT))  # 0 for what is not a number.
        DirectorySource(self._of.directory).wait(query.get("seen", [""])[0], wait)
        return (self._of.directory / CURRENT).read_bytes()

    @staticmethod
    def _file(path: str) -> str:
        found = _NAME.fullmatch(path)
        if found is None or not (found[2] is None or is_file_of_a_bundle(found[2])):
            raise FileNotFoundError(path)
        return found[1]

    def _send(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._begin(HTTPStatus.OK, path.stat().st_size)
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def _say(self, status: HTTPStatus, body: bytes) -> None:
        self._begin(status, len(body))
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()
