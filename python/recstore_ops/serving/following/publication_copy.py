"""Copies a publication to an object store while it goes on."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from recstore_ops import _native
from recstore_ops.config.directory import Directory
from recstore_ops.serving.following.names import CURRENT, UPDATES, is_file_of_a_publication
from recstore_ops.serving.following.publication import Current, current_text, names_in
from recstore_ops.serving.manifest import is_file_of_a_bundle

_log = logging.getLogger("recstore_ops.publish")

_PAUSE = 1.0
"""Seconds before what failed is tried again."""

_LIST_EVERY = 60.0
"""Seconds between two listings of the object store, so that deleted files are copied again. Each is a request."""


class PublicationCopy:
    """The copy of a publication's directory in an object store, which a thread keeps up to date.

    An object store has no locks: each URL must have only one publisher.

    Args:
        directory: of the publication.
        url: `s3://bucket/prefix` or `file:///path`.

    Attributes:
        url: the address of the copy.
        problem: the error of the last attempt to copy, if it failed. Copying is tried again.

    Raises:
        ValueError: the URL is not understood, or has something else than a publication.
        OSError: the object store does not answer, or refuses.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self.url = url
        self.problem: OSError | ValueError | None = None
        self._directory, self._folder = directory, _native.PublicationFolder(url, {})
        self._text: str | None = None
        self._list()
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
                is_told = self._changed.wait_for(
                    lambda: self._told > self._copied or self._is_ending, self._until_list()
                )
                # Read before the copy: news that come while it runs need another one.
                told = self._told
            problem = self._try() if told > self._copied or not is_told else None
            with self._changed:
                self.problem, self._copied = problem, self._copied if problem else told
                self._changed.notify_all()
                if self._is_ending and (problem or self._told == told):
                    return
                if problem:
                    self._changed.wait_for(lambda: self._is_ending, _PAUSE)

    def _until_list(self) -> float:
        """Seconds until it is time to look what is there."""
        return max(0.0, self._listed_at + _LIST_EVERY - time.monotonic())

    def _try(self) -> OSError | ValueError | None:
        try:
            self._copy()
        except Exception as error:
            expected = isinstance(error, OSError | ValueError)  # A ValueError: it is no publication any more.
            problem = error if expected else OSError(f"{self.url}: {error!r}")
            if str(problem) != str(self.problem):
                _log.warning("the publication %s could not be copied to %s: %s", self._directory, self.url, problem)
            self._listed_at = -_LIST_EVERY  # What is there is not known for sure.
            return problem
        return None

    def _copy(self) -> None:
        """Copies what the publication says now; anew if a file went because it says something else meanwhile."""
        if not self._until_list():
            self._list()
        while True:
            text = current_text(self._directory)
            try:
                return self._copy_as(text)
            except OSError:
                if current_text(self._directory) == text:
                    raise

    def _list(self) -> None:
        """Looks what is there.

        Raises:
            ValueError: something else than files of a publication.
            OSError: the object store does not answer, or refuses.
        """
        there = set(self._folder.names())
        if other := sorted(name for name in there if name != CURRENT and not is_file_of_a_publication(name)):
            raise ValueError(f"{self.url} is no publication: it has {other[0]}")
        self._there, self._listed_at = there, time.monotonic()

    def _copy_as(self, text: str) -> None:
        """Copies the files that followers need, then the text that names them, then deletes files no longer needed."""
        with Directory(self._directory) as held:
            needed = _files(held, Current.parse(text, self._directory / CURRENT))
            for name in sorted(needed - self._there):
                with held.open(name) as file:
                    # By its descriptor, so that it is the file that was opened and no link that has taken its name.
                    self._folder.upload(name, f"/dev/fd/{file.fileno()}")
                self._there.add(name)
        if text != self._text or CURRENT not in self._there:
            self._folder.write(CURRENT, text.encode())
            self._there.add(CURRENT)
            self._text = text
        for name in self._there - needed - {CURRENT}:
            self._folder.remove(name)
            self._there.remove(name)


def _files(held: Directory, current: Current) -> set[str]:
    """The names of all files that followers may need.

    Raises:
        OSError: one is missing.
    """
    there = names_in(held)
    names = set[str]()
    for stretch in current.stretches():
        base = stretch.base.name
        updates = [str(name) for name in there if name.folder == UPDATES and stretch.has(name)]
        if len(updates) != stretch.last - stretch.base.after:
            raise FileNotFoundError(f"{held.path} lacks updates that follow {base}")
        names.update(updates)
        names.update(f"{base}/{file}" for file in _files_of_base(held, base))
    return names


def _files_of_base(held: Directory, base: str) -> list[str]:
    with held.subdirectory(base) as own, own.subdirectory("tables") as tables:
        found = [*own.names(), *(f"tables/{name}" for name in tables.names())]
    return [name for name in found if is_file_of_a_bundle(name)]
