"""Copies a publication to an object store while it goes on."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from recstore_ops import _native
from recstore_ops.serving.following.publication import BASES, CURRENT, UPDATES, Current, current_text
from recstore_ops.serving.following.publication_files import needed_files

_log = logging.getLogger("recstore_ops.publish")

_PAUSE = 1.0
"""Seconds before what failed is tried again."""

_NAME = re.compile(rf"{CURRENT}|{BASES}/[0-9]+-\w+/[\w./]+|{UPDATES}/[0-9]+-\w+\.update")


class PublicationCopy:
    """The copy of a publication's directory in an object store, which a thread keeps up.

    An object store has no locks: of one URL there must be one publisher.

    Args:
        directory: of the publication.
        url: `s3://bucket/prefix` or `file:///path`.

    Attributes:
        url: where the copy is.
        problem: why it could not be kept up when this was tried last, if it could not. It is tried again.

    Raises:
        ValueError: the URL is not understood, or has something else than a publication.
        OSError: the object store does not answer, or refuses.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self.url = url
        self.problem: OSError | ValueError | None = None
        self._directory, self._folder = directory, _native.PublicationFolder(url, {})
        self._there = set(self._folder.names())
        if other := sorted(name for name in self._there if not _NAME.fullmatch(name)):
            raise ValueError(f"{url} is no publication: it has {other[0]}")
        self._told, self._copied, self._is_ending = 0, 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep_up, name="recstore-publish-copy", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Says that the directory has news."""
        with self._changed:
            self._told += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all news are copied, or could not be.

        Raises:
            OSError, ValueError: they could not be.
        """
        with self._changed:
            told = self._told
            self._changed.wait_for(lambda: self._copied >= told or self.problem is not None)
            if self._copied < told and self.problem is not None:
                raise self.problem

    def close(self) -> None:
        """Ends the thread once the news are copied, or could not be.

        Raises:
            OSError, ValueError: they could not be.
        """
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join()
        self.flush()

    def _keep_up(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._told > self._copied or self._is_ending)
                told = self._told
            problem = self._try() if told > self._copied else None
            with self._changed:
                self.problem, self._copied = problem, self._copied if problem else told
                self._changed.notify_all()
                if self._is_ending and (problem or self._told == told):
                    return
                if problem:
                    self._changed.wait_for(lambda: self._is_ending, _PAUSE)

    def _try(self) -> OSError | ValueError | None:
        try:
            self._copy()
        except (OSError, ValueError) as error:  # A ValueError: the directory is no publication any more.
            if str(error) != str(self.problem):
                _log.warning("the publication %s could not be copied to %s: %s", self._directory, self.url, error)
            return error
        return None

    def _copy(self) -> None:
        """Copies what the publication says now; anew if a file went because it says something else meanwhile."""
        while True:
            text = current_text(self._directory)
            try:
                return self._copy_as(text)
            except OSError:
                if current_text(self._directory) == text:
                    raise

    def _copy_as(self, text: str) -> None:
        """Copies what followers need first, then says so, then deletes what they need no more."""
        needed = dict(_files(self._directory, Current.parse(text, self._directory / CURRENT)))
        for name, path in needed.items():
            if name not in self._there:
                self._folder.upload(name, str(path))
                self._there.add(name)
        self._folder.write(CURRENT, text.encode())
        self._there.add(CURRENT)
        for name in self._there - needed.keys() - {CURRENT}:
            self._folder.remove(name)
            self._there.remove(name)


def _files(directory: Path, current: Current) -> Iterator[tuple[str, Path]]:
    """Each file that followers may need, by its name in the publication."""
    for name in sorted(needed_files(current)):
        path = directory / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() or file == path:
                yield str(file.relative_to(directory)), file
