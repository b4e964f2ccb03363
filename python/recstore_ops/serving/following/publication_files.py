"""Writes the files of a publication, and deletes those that nobody needs any more.

What a publisher that is killed may leave is noted before it is there, as saves do: a base that no update has made whole
yet, and what is about to be deleted. The next publisher deletes what is noted and not needed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from recstore_ops.serving.checked_json import checked_json, parse_checked_json
from recstore_ops.serving.following.publication import BASES, CURRENT, UPDATES, Base, Current, Update, update_name

_LOCK, _NOTE = ".lock", ".unfinished.json"
WRITING = f"{BASES}/.writing"
"""The base that is being written."""

_FORMAT, _VERSION = "recstore publication's unfinished files", 1
_CUT_OFF = (f".{CURRENT}", f"{_NOTE}.new")
"""What a publisher that is killed may leave of a file that it was about to put in its place."""
_OWN = (_LOCK, _NOTE, *_CUT_OFF, BASES, UPDATES)
_NAME = re.compile(rf"({BASES}|{UPDATES})/[0-9]+-\w+(\.update)?")
_LEAST_BYTES = 16 << 20
"""Of updates between two bases."""


class PublicationFiles:
    """The directory of a publication, for the one who writes it.

    Attributes:
        directory: it.
        current: what it says; None before its first base.
        bytes_written: of all updates.
        bytes_since_base: of the updates behind the newest base.

    Raises:
        ValueError: something else is in the directory, or another process publishes to it.
        OSError: it cannot be written, or a file of it is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        has_current = (directory / CURRENT).exists()
        if not has_current and any(each.name not in _OWN for each in directory.iterdir()):
            raise ValueError(f"{directory} is no publication: it has other files and no {CURRENT}")
        self.current = Current.read(directory) if has_current else None
        self.bytes_since_base = self.bytes_written = 0
        self._lock = _locked(directory)
        self._noted: set[str] = set()
        try:
            for folder in (BASES, UPDATES):
                (directory / folder).mkdir(exist_ok=True)
            self._clean_up_after_another()
        except BaseException:
            self.close()
            raise

    def newest_update(self) -> int:
        """Returns the number of the newest update, 0 before the first."""
        return 0 if self.current is None else self.current.update

    def note_base(self, base: Base) -> None:
        """Notes that a base is about to be there."""
        self._note([base.name])

    def write_base(self, base: Base, write: Callable[[Path], None]) -> None:
        """Has `write` write a bundle that is noted. It counts from the update on that makes it whole."""
        writing, place = self.directory / WRITING, self.directory / base.name
        try:
            write(writing)
            writing.rename(place)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise

    def drop_base(self) -> None:
        """Deletes a base that no update has made whole."""
        self._clean()

    def write_update(self, update: Update, base: Base | None) -> None:
        """Writes an update, and makes it the newest; `base` is the one that it makes whole, if it does."""
        path, data = self.directory / update.name, update.to_bytes()
        try:
            path.write_bytes(data)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        before = self.current
        if base is None:
            assert before is not None, "the first update makes the first base whole"
            current = Current(before.base, update.number, before.previous)
        else:
            current = Current(base, update.number, before and (before.base, before.update))
            self.bytes_since_base = 0
            if before is not None and before.previous is not None:
                self._note(_files_of(*before.previous))
        self._set(current)
        self.bytes_since_base += len(data)
        self.bytes_written += len(data)
        if base is not None:
            self._clean()

    def begin_history(self, history: str, write_base: Callable[[Path, Path], None], updates: Sequence[Update]) -> None:
        """Puts a base and updates of another history in the place of all that there are, with the same numbers.

        Args:
            history: its name.
            write_base: given the directory of the base that there is, and that of the one to be written.
            updates: all that follow the base that there is, in the other history.
        """
        before = self._without_previous()
        base = replace(before.base, history=history)
        self.note_base(base)
        self.write_base(base, lambda directory: write_base(self.directory / before.base.name, directory))
        self._note([update.name for update in updates])
        for update in updates:
            (self.directory / update.name).write_bytes(update.to_bytes())
        self._set(Current(base, before.update, (before.base, before.update)))
        self._without_previous()

    def _without_previous(self) -> Current:
        """Deletes the base before the current one, and what follows it only."""
        current = self.current
        assert current is not None, "there is a base before there is another"
        if current.previous is not None:
            without = replace(current, previous=None)
            # It says so until all are gone: whoever was cut off finds them by it.
            self._remove(needed_files(current) - needed_files(without))
            current = without
            self._set(current)
        return current

    def _set(self, current: Current) -> None:
        current.write(self.directory)
        self.current = current

    def _note(self, names: Iterable[str]) -> None:
        """Notes files that may be there and not be needed."""
        self._noted.update(names)
        beside = self.directory / f"{_NOTE}.new"
        beside.write_text(checked_json({"files": sorted(self._noted)}, _FORMAT, _VERSION), encoding="utf-8")
        os.replace(beside, self.directory / _NOTE)

    def _clean(self) -> None:
        """Deletes what is noted and not needed, and then the note."""
        self._remove(self._noted - needed_files(self.current))
        (self.directory / _NOTE).unlink(missing_ok=True)
        self._noted.clear()

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.directory / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _clean_up_after_another(self) -> None:
        shutil.rmtree(self.directory / WRITING, ignore_errors=True)
        note = self.directory / _NOTE
        if note.exists():
            text = note.read_text(encoding="utf-8", errors="replace")
            self._noted.update(parse_checked_json(text, note, _FORMAT, _VERSION)["files"])
        foreign = next((name for name in self._noted if not _NAME.fullmatch(name)), None)
        if foreign is not None:
            raise OSError(f"{note} names {foreign!r}, which is no file of a publication")
        self._clean()

    def wants_base(self) -> bool:
        """Whether the updates behind the newest base take more than its tables do."""
        assert self.current is not None, "there is a base before the first update"
        tables = self.directory / self.current.base.name / "tables"
        bytes_of_base = sum(file.stat().st_size for file in tables.iterdir())
        return self.bytes_since_base > max(bytes_of_base, _LEAST_BYTES)

    @property
    def is_open(self) -> bool:
        """Whether this process writes."""
        return self._lock >= 0

    def close(self) -> None:
        """Lets others write."""
        if self.is_open:
            os.close(self._lock)
            self._lock = -1


def _files_of(base: Base, last: int) -> set[str]:
    """The names of a base and of the updates that follow it, up to `last`."""
    return {base.name, *(update_name(base.history, number) for number in range(base.after + 1, last + 1))}


def needed_files(current: Current | None) -> set[str]:
    """The names of the bases and updates that followers may ask for."""
    if current is None:
        return set()
    previous = set() if current.previous is None else _files_of(*current.previous)
    return previous | _files_of(current.base, current.update)


def _locked(directory: Path) -> int:
    file = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ValueError(f"another publisher writes to {directory}") from None
    return file
