"""Sources of a publication: its directory, the address of a publisher, or a copy in an object store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from recstore_ops import _native
from recstore_ops.config.directory import Directory
from recstore_ops.config.paths import user_path
from recstore_ops.serving.following.copied_base import copied_base
from recstore_ops.serving.following.http_source import ADDRESS, HttpSource, PublisherAddress
from recstore_ops.serving.following.listening import Listening
from recstore_ops.serving.following.names import CURRENT
from recstore_ops.serving.following.publication import MAX_CURRENT_BYTES, Base, Current, current_text
from recstore_ops.serving.following.update import Update

_POLL = 0.01
"""The polling interval of a directory in seconds. The files may lie on a machine that does not report changes."""

_OBJECT_POLL = 0.2
"""Seconds between two looks at an object store, each of which is a request that is paid for."""


class Source(Protocol):
    """A publication to be read.

    Attributes:
        silence: seconds that an answer has been waited for.
    """

    @property
    def silence(self) -> float: ...

    def wait(self, seen: str | None, timeout: float) -> Current:
        """Returns the contents of the publication as soon as its tag differs from the one seen, or after a time.

        Raises:
            ValueError: there is no publication, or one of another version.
            OSError: it cannot be read.
        """
        ...

    def update(self, name: str, most: int) -> Update:
        """Reads an update of at most so many bytes.

        Raises:
            OSError: it is not there any more, cannot be read, is larger, or is damaged.
        """
        ...

    def base(self, base: Base) -> AbstractContextManager[Directory]:
        """Gives the directory of a base; once it is opened, it may go.

        Raises:
            OSError: it is not there any more, or cannot be read.
        """
        ...

    def close(self) -> None:
        """Ends what another thread reads, as far as it can be ended."""
        ...


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
    return HttpSource(PublisherAddress(text)) if ADDRESS.fullmatch(text) else DirectorySource(follow)


def _first_news(read: Callable[[], Current], pause: float, seen: str | None, timeout: float) -> Current:
    """Polls the contents of a publication until its tag differs from the one seen, or for a time."""
    end = time.monotonic() + timeout
    while True:
        # Before the first look at the clock: the contents are read at least once, whatever the time limit.
        current = read()
        if current.tag != seen or time.monotonic() >= end:
            return current
        time.sleep(pause)


class DirectorySource(Listening):
    """The directory of a publication.

    Args:
        path: of the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(user_path(path, "follow"))
        self._read_last: tuple[str, Current] | None = None

    def __repr__(self) -> str:
        return str(self._path)

    def wait(self, seen: str | None, timeout: float) -> Current:
        """See `Source`."""
        return _first_news(self._read, _POLL, seen, timeout)

    def update(self, name: str, most: int) -> Update:
        """See `Source`."""
        with self.listening(), Directory(self._path) as directory:
            return Update.from_bytes(directory.read(name, most=most), name)

    @contextmanager
    def base(self, base: Base) -> Iterator[Directory]:
        """See `Source`."""
        with Directory(self._path) as directory, directory.subdirectory(base.name) as held:
            yield held

    def close(self) -> None:
        """A file system ends what is read by itself."""

    def _read(self) -> Current:
        """The contents of the publication, parsed only if the text has changed.

        The number and time of the file do not show a change: numbers are used again, and times are as coarse as the
        system's clock.
        """
        with self.listening():
            text = current_text(self._path)
        if self._read_last is None or text != self._read_last[0]:
            self._read_last = text, Current.parse(text, self._path / CURRENT)
        return self._read_last[1]


class ObjectSource(Listening):
    """The copy of a publication in an object store. A base is copied to a directory, which goes once it is opened.

    Args:
        url: `s3://bucket/prefix` or `file:///path`; keys come from the environment.

    Raises:
        ValueError: the URL is not understood.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._folder = url, _native.PublicationFolder(url, {})

    def __repr__(self) -> str:
        return self._url

    def wait(self, seen: str | None, timeout: float) -> Current:
        """See `Source`."""
        return _first_news(self._read, _OBJECT_POLL, seen, timeout)

    def update(self, name: str, most: int) -> Update:
        """See `Source`."""
        found = self._read_object(name, most)
        if found is None:
            raise FileNotFoundError(f"{self._url} has no {name} any more")
        return Update.from_bytes(found, name)

    def base(self, base: Base) -> AbstractContextManager[Directory]:
        """See `Source`."""
        return copied_base(partial(self._copy, base))

    def close(self) -> None:
        """An object store has limits of its own for requests."""

    def _read_object(self, name: str, most: int) -> bytes | None:
        with self.listening():
            # The folder reads an object as a whole, so that its size is checked only afterwards.
            found = self._folder.read(name)
        if found is not None and len(found) > most:
            raise OSError(f"{self._url}/{name} has {len(found)} bytes, at most {most} are expected")
        return found

    def _read(self) -> Current:
        found = self._read_object(CURRENT, MAX_CURRENT_BYTES)
        if found is None:
            raise ValueError(f"{self._url} is no publication: it has no {CURRENT}")
        return Current.parse(found.decode("utf-8", "replace"), f"{self._url}/{CURRENT}")

    def _copy(self, base: Base, name: str, directory: Path, most: int) -> None:
        if not self._folder.download(f"{base.name}/{name}", str(directory / name)):
            raise FileNotFoundError(f"{self._url} has no {base.name}/{name} any more")
