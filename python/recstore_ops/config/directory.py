"""A directory that is held open: what is inside is opened relative to it, and never over a symbolic link."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from recstore_ops import _native

_OF_EDITORS = ".#"
"""How Emacs's names of links begin; no format of this package has such names."""


class Directory:
    """A directory that is held open.

    The directory's own path may lead over symbolic links: it belongs to the caller. A name inside must be relative, and
    none of its parts may be empty, `.` or `..`. A link, a FIFO or a device with such a name is refused. So is anything
    but a regular file if one is expected. No call waits for the other end of a FIFO.

    Args:
        path: of a directory that is there.

    Raises:
        OSError: it is not there, or no directory.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._hold(_native.Directory.open(path), path)

    def _hold(self, native: _native.Directory, path: str | PathLike[str]) -> None:
        self._native, self._path = native, Path(path)

    @classmethod
    def _of(cls, native: _native.Directory, path: Path) -> Directory:
        made = cls.__new__(cls)
        made._hold(native, path)
        return made

    @classmethod
    def create(cls, path: str | PathLike[str]) -> Directory:
        """Opens a directory, which it makes with those above it if it is not there.

        Raises:
            OSError: it cannot be made.
        """
        return cls._of(_native.Directory.create(path), Path(path))

    @property
    def path(self) -> Path:
        """Its path, as it was given."""
        return self._path

    @property
    def native(self) -> _native.Directory:
        """The native directory, for native functions."""
        return self._native

    def subdirectory(self, name: str) -> Directory:
        """Opens a directory inside.

        Raises:
            OSError: it is not there, or no directory.
            ValueError: the name leads out.
        """
        return self._of(self._native.subdirectory(name), self._path / name)

    def create_subdirectory(self, name: str) -> Directory:
        """Opens a directory inside, which it makes if it is not there.

        Raises:
            OSError: it cannot be made.
            ValueError: the name leads out.
        """
        return self._of(self._native.create_subdirectory(name), self._path / name)

    def open(self, name: str) -> BinaryIO:
        """Opens a file to be read.

        Raises:
            OSError: it is not there, or no regular file.
            ValueError: the name leads out.
        """
        return self._file(name, "rb", self._native.open_file)

    def read(self, name: str, most: int = 1 << 30) -> bytes:
        """Reads a whole file.

        Args:
            name: of the file.
            most: the bytes that it may have.

        Raises:
            OSError: it is not there, no regular file, or has more bytes.
            ValueError: the name leads out.
        """
        return self._native.read(name, most)

    def create_new(self, name: str) -> BinaryIO:
        """Makes a file, to be written.

        Raises:
            OSError: the name is taken, or it cannot be made.
            ValueError: the name leads out.
        """
        return self._file(name, "wb", self._native.create_new)

    def append(self, name: str) -> BinaryIO:
        """Opens a file to be written at its end, which it makes if it is not there.

        Raises:
            OSError: it is no regular file, or cannot be written.
            ValueError: the name leads out.
        """
        return self._file(name, "ab", self._native.append_to)

    def replace(self, name: str, data: bytes) -> None:
        """Puts a new file in the place of the one of a name: readers see the old one or the new one, after a crash too.

        Raises:
            OSError: something else than a file has the name, or it cannot be written; the old one stays.
            ValueError: the name leads out.
        """
        self._native.replace(name, data)

    def remove_file(self, name: str) -> None:
        """Removes a file.

        Raises:
            OSError: it is not there, or no regular file.
            ValueError: the name leads out.
        """
        self._native.remove_file(name)

    def remove_directory(self, name: str) -> None:
        """Removes a directory that is empty.

        Raises:
            OSError: it is not there, no directory, or not empty.
            ValueError: the name leads out.
        """
        self._native.remove_directory(name)

    def remove_tree(self, name: str) -> None:
        """Removes a directory with all that is in it: of links the links themselves, never what they lead to.

        Raises:
            OSError: it is not there, no directory, or something in it cannot be removed.
            ValueError: the name leads out.
        """
        self._native.remove_tree(name)

    def rename(self, old: str, new: str) -> None:
        """Gives a file or directory inside another name inside. A file takes the place of a file.

        Raises:
            OSError: it is not there, or something else has the name.
            ValueError: a name leads out.
        """
        self._native.rename(old, new)

    def link(self, name: str, other: Directory) -> None:
        """Gives a file a further name, the same in another directory.

        Raises:
            OSError: it is no regular file, the name is taken there, or the file system cannot do that.
            ValueError: the name leads out.
        """
        self._native.link(name, other.native)

    def names(self) -> list[str]:
        """Returns the names inside, sorted."""
        return self._native.names()

    def kind(self, name: str) -> str | None:
        """Returns what has a name inside, as "a regular file", "a directory" or "a symbolic link"; `None` if nothing.

        Raises:
            OSError: the kind cannot be determined.
            ValueError: the name leads out.
        """
        return self._native.kind(name)

    def check_plain(self, *, below: bool = False) -> None:
        """Checks that all names inside are files and directories, but for the links by which editors lock files.

        Args:
            below: whether those in its directories are looked at too, and in theirs.

        Raises:
            OSError: one is a link or something else.
        """
        for name in self.names():
            if name.startswith(_OF_EDITORS):
                continue
            kind = self._native.kind(name)
            if kind == "a directory":
                if below:
                    self.subdirectory(name).check_plain(below=True)
            # Opening is the check, and refuses all but regular files. A name without a kind has gone since names were
            # listed.
            elif kind is not None:
                self.open(name).close()

    def lock(self, name: str) -> HeldLock:
        """Locks a file, which it makes if it is not there, until the lock is released.

        Raises:
            BlockingIOError: the lock is held already.
            OSError: it is no regular file, or cannot be written.
            ValueError: the name leads out.
        """
        return HeldLock(self._file(name, "r+b", self._native.lock_file))

    def sync(self) -> None:
        """Makes the names inside survive a crash.

        Raises:
            OSError: the system's.
        """
        self._native.sync()

    def close(self) -> None:
        """Holds it no longer. Files that were opened stay open."""
        self._native.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Directory({str(self._path)!r})"

    def _file(self, name: str, mode: str, open_native: Callable[[str], int]) -> BinaryIO:
        # The path is for errors alone. The native call opens the name relative to the directory that is held.
        return cast(BinaryIO, open(self._path / name, mode, opener=lambda path, flags: open_native(name)))


class HeldLock:
    """A lock of a file, which ends when it is released, or with the process."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            # Not `lockf`, whose lock ends as soon as the process closes any other descriptor of the file.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            file.close()
            # The system's error of a lock names no file.
            if isinstance(error, OSError):
                error.filename = file.name
            raise
        self._file = file

    def release(self) -> None:
        """Ends the lock."""
        if not self._file.closed:
            # Closing the file would not do: a child that was forked meanwhile has it open too.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def check_name(name: str, whose: str | PathLike[str]) -> None:
    """Checks that a name stays in its directory: it is relative, and no part of it is empty, `.` or `..`.

    Args:
        name: as it was found.
        whose: the file that has the name, for errors.

    Raises:
        ValueError: it does not.
    """
    _native.check_file_name(name, os.fspath(whose))


def replace_file(path: Path, content: bytes) -> None:
    """Puts a file in its place, in one move.

    Raises:
        OSError: something else than a file has the name, or it cannot be written; the old file stays.
    """
    with Directory(path.parent) as directory:
        directory.replace(path.name, content)


def read_file(path: Path) -> bytes:
    """Reads a regular file.

    Raises:
        OSError: it is not there, or no regular file.
    """
    with Directory(path.parent) as directory:
        return directory.read(path.name)


__all__ = ["Directory", "HeldLock", "check_name"]
