"""A publication that is served over HTTP."""

from __future__ import annotations

import http.client
import io
import os
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from recstore_ops.config.directory import Directory
from recstore_ops.config.tokens import check_token
from recstore_ops.servers.server_config import Tls
from recstore_ops.serving.following.copied_base import copied_base
from recstore_ops.serving.following.listening import Listening
from recstore_ops.serving.following.names import CURRENT
from recstore_ops.serving.following.publication import MAX_CURRENT_BYTES, Base, Current
from recstore_ops.serving.following.time_limits import BYTES_PER_SECOND, TimeLimit
from recstore_ops.serving.following.update import Update

_TIMEOUT = 30.0
"""Seconds that a publisher may take for the head of an answer, and for a pause in it."""

_BYTES_PER_CHUNK = 1 << 20
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")


@dataclass(frozen=True)
class PublisherAddress:
    """The address at which a publisher serves its publication over HTTP.

    Attributes:
        address: `host:port`.
        token: the token that the publisher expects.
        tls: the authorities of its certificate, and a certificate of one's own; None: nothing is encrypted.

    Raises:
        ValueError: another address, or a token that no publisher asks for.
    """

    __module__ = "recstore_ops"

    address: str
    token: str | None = None
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if not ADDRESS.fullmatch(self.address):
            raise ValueError(f"the address of a publisher is host:port, got {self.address!r}")
        check_token(self.token)


class HttpSource(Listening):
    """A publication that is served over HTTP. A base is copied to a directory, which goes once the base is opened."""

    def __init__(self, publisher: PublisherAddress) -> None:
        super().__init__()
        self._publisher = publisher
        host, _, port = publisher.address.rpartition(":")
        self._host, self._port = host.removeprefix("[").removesuffix("]"), int(port)
        self._connection: http.client.HTTPConnection | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return self._publisher.address

    def wait(self, seen: str | None, timeout: float) -> Current:
        """See `Source`."""
        path = f"/{CURRENT}?seen={seen or ''}&wait={timeout:g}"
        text = b"".join(self._asked(path, MAX_CURRENT_BYTES, timeout)).decode("utf-8", "replace")
        return Current.parse(text, f"http://{self!r}/{CURRENT}")

    def update(self, name: str, most: int) -> Update:
        """See `Source`."""
        return Update.from_bytes(b"".join(self._asked(f"/{name}", most)), name)

    def base(self, base: Base) -> AbstractContextManager[Directory]:
        """See `Source`."""
        return copied_base(partial(self._copy, base))

    def close(self) -> None:
        """See `Source`."""
        # Noted before the connection is cut, or the request under way would be repeated over a new one.
        self._is_closed, connection = True, self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _copy(self, base: Base, name: str, directory: Path, most: int) -> None:
        with open(directory / name, "xb") as file:  # by path: a new directory
            file.writelines(self._asked(f"/{base.name}/{name}", most))

    def _asked(self, path: str, most: int, timeout: float = 0.0) -> Iterator[bytes]:
        """Yields the parts of an answer of at most so many bytes. The connection goes with what fails."""
        with self._failing(path), self.listening():
            response = self._begun(path, timeout)
            left = self._length(response, path, most)
            while left > 0:
                part = response.read(min(left, _BYTES_PER_CHUNK))
                if not part:
                    raise OSError(f"{self!r} ended {left} bytes before the end of {path}")
                self.heard()
                left -= len(part)
                yield part
            response.read()  # There is nothing left, which http.client has to see.

    @contextmanager
    def _failing(self, path: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._disconnect()
            if isinstance(error, TimeoutError):
                raise OSError(f"{self!r}: {path}: it is silent, or sends too slowly") from error
            if isinstance(error, http.client.HTTPException | ssl.SSLError | ConnectionError | socket.gaierror):
                raise OSError(f"{self!r}: {path}: {error!r}") from error
            raise

    def _begun(self, path: str, timeout: float) -> http.client.HTTPResponse:
        """Asks, and returns the answer once its head is there."""
        is_reused = self._connection is not None
        try:
            response = self._answered(path, timeout)
        except ConnectionError:  # A publisher may close a connection that it has no request of.
            if not is_reused or self._is_closed:
                raise
            self._disconnect()
            response = self._answered(path, timeout)
        if response.status == HTTPStatus.NOT_FOUND:
            raise FileNotFoundError(f"{self!r} has no {path} any more")
        if response.status != HTTPStatus.OK:
            raise OSError(f"{self!r}: {response.status} {response.read(1000).decode('utf-8', 'replace')}")
        response.begin_body()
        return response

    def _answered(self, path: str, timeout: float) -> _Response:
        connection = self._connection = self._connection or self._connected()
        # Connected by hand, so that there is a socket to give this request's timeout to.
        if connection.sock is None:
            connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(timeout + _TIMEOUT)
        token = self._publisher.token
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        assert isinstance(response, _Response), "the connection makes no other"
        return response

    def _length(self, response: http.client.HTTPResponse, path: str, most: int) -> int:
        """Returns the bytes of an answer."""
        if response.length is None:
            raise OSError(f"{self!r} does not say how many bytes {path} has")
        if response.length > most:
            raise OSError(f"{self!r}: {path} has {response.length} bytes, at most {most} are expected")
        return response.length

    def _connected(self) -> http.client.HTTPConnection:
        tls = self._publisher.tls
        if tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT)
        else:
            context = ssl.create_default_context(cafile=None if tls.ca is None else os.fspath(tls.ca))
            if tls.certificate is not None and tls.key is not None:
                context.load_cert_chain(tls.certificate, tls.key)
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT, context=context)
        connection.response_class = _Response
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class _Response(http.client.HTTPResponse):
    """An answer that must come in time: its head within the timeout of the socket, what follows at a least pace."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        # The reader that http.client made has no limit for the answer as a whole.
        self.fp.close()
        self._incoming = _Incoming(sock)
        self.fp = io.BufferedReader(self._incoming)

    def begin_body(self) -> None:
        """The head is there."""
        self._incoming.begin_body()


class _Incoming(io.RawIOBase):
    """Reads from a socket within a time limit."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._raw = sock, sock.makefile("rb", buffering=0)
        self._limit = TimeLimit(sock.gettimeout() or _TIMEOUT)

    def begin_body(self) -> None:
        """Allows more time from now on: a body may be long."""
        self._limit = TimeLimit(_TIMEOUT, BYTES_PER_SECOND)

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """See `io.RawIOBase`; raises TimeoutError."""
        self._socket.settimeout(self._limit.left())
        count = self._raw.readinto(buffer)
        self._limit.went(count or 0)
        return count

    def close(self) -> None:
        """See `io.RawIOBase`."""
        self._raw.close()
        super().close()
