"""Where a publication is read from: its directory, the address of one who serves it, or a copy in an object store."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from recstore_ops import _native
from recstore_ops.config.paths import user_path
from recstore_ops.config.tokens import check_token
from recstore_ops.servers.server_config import Tls
from recstore_ops.serving.following.publication import CURRENT, Base, Current, Update, current_text
from recstore_ops.serving.manifest import NAME as MANIFEST
from recstore_ops.serving.manifest import Manifest, is_file_of_a_bundle

_POLL = 0.01
"""Seconds between two looks at a directory. Its files may lie on another machine, which tells of no change."""

_OBJECT_POLL = 0.2
"""Seconds between two looks at an object store, each of which is a request that is paid for."""

_PATIENCE = 30.0
"""Seconds that a publisher may be silent for."""

_BYTES_AT_A_TIME = 1 << 20
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")


class Source(Protocol):
    """A publication to be read."""

    def wait(self, seen: str | None, timeout: float) -> Current:
        """Returns what the publication says as soon as its tag is another than what was seen, or after a time.

        Raises:
            ValueError: there is no publication, or one of another version.
            OSError: it cannot be read.
        """
        ...

    def update(self, name: str) -> Update:
        """Reads an update.

        Raises:
            OSError: it is not there any more, cannot be read, or is damaged.
        """
        ...

    def base(self, base: Base) -> AbstractContextManager[Path]:
        """Gives the directory of a base; once it is opened, it may go.

        Raises:
            OSError: it is not there any more, or cannot be read.
        """
        ...


@dataclass(frozen=True)
class PublisherAddress:
    """Where a publisher serves its publication over HTTP.

    Attributes:
        address: `host:port`.
        token: what it wants to be told.
        tls: the authorities of its certificate, and a certificate of one's own; None: nothing is encrypted.

    Raises:
        ValueError: another address, or a token that no publisher asks for.
    """

    __module__ = "recstore_ops"

    address: str
    token: str | None = None
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if not _ADDRESS.fullmatch(self.address):
            raise ValueError(f"the address of a publisher is host:port, got {self.address!r}")
        check_token(self.token)


def source_of(follow: str | os.PathLike[str] | PublisherAddress) -> Source:
    """Returns where a publication is read from.

    Raises:
        ValueError: the URL of an object store that is not understood.
    """
    if isinstance(follow, PublisherAddress):
        return HttpSource(follow)
    text = os.fspath(follow)
    if "://" in text:
        return ObjectSource(text)
    return HttpSource(PublisherAddress(text)) if _ADDRESS.fullmatch(text) else DirectorySource(follow)


def _first_news(read: Callable[[], Current], pause: float, seen: str | None, timeout: float) -> Current:
    """Reads what a publication says until its tag is another than what was seen, or for a time."""
    end = time.monotonic() + timeout
    while True:
        current = read()
        if current.tag != seen or time.monotonic() >= end:
            return current
        time.sleep(pause)


@contextmanager
def _copied_base(whose: Source, copy: Callable[[str, Path], None]) -> Iterator[Path]:
    """Gives a directory with the files of a base, which `copy` copies one by one; then it goes.

    Raises:
        OSError: the base names what is no file of a bundle.
    """
    with tempfile.TemporaryDirectory(prefix="recstore-base-") as directory:
        path = Path(directory)
        copy(MANIFEST, path)
        manifest = Manifest.read(path)
        (path / "tables").mkdir()
        for name in (*manifest.files, *(table.file for table in manifest.tables)):
            if not is_file_of_a_bundle(name):
                raise OSError(f"{whose!r}: {name!r} is no file of a bundle")
            copy(name, path)
        yield path


class DirectorySource:
    """The directory of a publication.

    Args:
        path: of the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(user_path(path, "follow"))
        self._text: str | None = None
        self._current: Current | None = None

    def __repr__(self) -> str:
        return str(self._path)

    def wait(self, seen: str | None, timeout: float) -> Current:
        """See `Source`."""
        return _first_news(self._read, _POLL, seen, timeout)

    def update(self, name: str) -> Update:
        """See `Source`."""
        return Update.from_bytes((self._path / name).read_bytes(), name)

    @contextmanager
    def base(self, base: Base) -> Iterator[Path]:
        """See `Source`."""
        yield self._path / base.name

    def _read(self) -> Current:
        """What the publication says, parsed only if it is another text.

        Its number and time would not tell: numbers are used again, and times are as coarse as the system's clock.
        """
        text = current_text(self._path)
        if self._current is None or text != self._text:
            self._current, self._text = Current.parse(text, self._path / CURRENT), text
        return self._current


class HttpSource:
    """A publication that is served over HTTP. A base is copied to a directory, which goes once the base is opened."""

    def __init__(self, publisher: PublisherAddress) -> None:
        self._publisher = publisher
        host, _, port = publisher.address.rpartition(":")
        self._host, self._port = host.removeprefix("[").removesuffix("]"), int(port)
        self._connection: http.client.HTTPConnection | None = None

    def __repr__(self) -> str:
        return self._publisher.address

    def wait(self, seen: str | None, timeout: float) -> Current:
        """See `Source`."""
        path = f"/{CURRENT}?seen={seen or ''}&wait={timeout:g}"
        return Current.parse(self._get(path, timeout).decode("utf-8", "replace"), f"http://{self!r}/{CURRENT}")

    def update(self, name: str) -> Update:
        """See `Source`."""
        return Update.from_bytes(self._get(f"/{name}"), name)

    def base(self, base: Base) -> AbstractContextManager[Path]:
        """See `Source`."""
        return _copied_base(self, partial(self._copy, base))

    def _copy(self, base: Base, name: str, directory: Path) -> None:
        with self._asked(f"/{base.name}/{name}", 0.0) as response, open(directory / name, "wb") as file:
            shutil.copyfileobj(response, file, _BYTES_AT_A_TIME)
            if (missing := response.length or 0) > 0:
                raise OSError(f"{self!r} ended {missing} bytes before the end of {base.name}/{name}")

    def _get(self, path: str, timeout: float = 0.0) -> bytes:
        with self._asked(path, timeout) as response:
            return response.read()

    @contextmanager
    def _asked(self, path: str, timeout: float) -> Iterator[http.client.HTTPResponse]:
        """Gives the answer to a request. The connection goes with what fails."""
        try:
            connection = self._connection = self._connection or self._connected()
            if connection.sock is not None:
                connection.sock.settimeout(timeout + _PATIENCE)
            token = self._publisher.token
            connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            if response.status == HTTPStatus.NOT_FOUND:
                response.read()
                raise FileNotFoundError(f"{self!r} has no {path} any more")
            if response.status != HTTPStatus.OK:
                raise OSError(f"{self!r}: {response.status} {response.read(1000).decode('utf-8', 'replace')}")
            yield response
        except FileNotFoundError:
            raise
        except BaseException as error:
            self._close()
            if isinstance(error, http.client.HTTPException | ssl.SSLError):
                raise OSError(f"{self!r}: {error!r}") from error
            raise

    def _connected(self) -> http.client.HTTPConnection:
        tls = self._publisher.tls
        if tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=_PATIENCE)
        context = ssl.create_default_context(cafile=None if tls.ca is None else os.fspath(tls.ca))
        if tls.certificate is not None and tls.key is not None:
            context.load_cert_chain(tls.certificate, tls.key)
        return http.client.HTTPSConnection(self._host, self._port, timeout=_PATIENCE, context=context)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class ObjectSource:
    """The copy of a publication in an object store. A base is copied to a directory, which goes once it is opened.

    Args:
        url: `s3://bucket/prefix` or `file:///path`; keys come from the environment.

    Raises:
        ValueError: the URL is not understood.
    """

    def __init__(self, url: str) -> None:
        self._url, self._folder = url, _native.PublicationFolder(url, {})

    def __repr__(self) -> str:
        return self._url

    def wait(self, seen: str | None, timeout: float) -> Current:
        """See `Source`."""
        return _first_news(self._read, _OBJECT_POLL, seen, timeout)

    def update(self, name: str) -> Update:
        """See `Source`."""
        found = self._folder.read(name)
        if found is None:
            raise FileNotFoundError(f"{self._url} has no {name} any more")
        return Update.from_bytes(found, name)

    def base(self, base: Base) -> AbstractContextManager[Path]:
        """See `Source`."""
        return _copied_base(self, partial(self._copy, base))

    def _read(self) -> Current:
        found = self._folder.read(CURRENT)
        if found is None:
            raise ValueError(f"{self._url} is no publication: it has no {CURRENT}")
        return Current.parse(found.decode("utf-8", "replace"), f"{self._url}/{CURRENT}")

    def _copy(self, base: Base, name: str, directory: Path) -> None:
        if not self._folder.download(f"{base.name}/{name}", str(directory / name)):
            raise FileNotFoundError(f"{self._url} has no {base.name}/{name} any more")
