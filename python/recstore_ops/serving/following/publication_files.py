"""Writes the files of a publication, and deletes those that are no longer needed.

Like a save, a publisher notes beforehand which files it may leave if it is killed: a base that no update has made whole
yet, and files about to be deleted. The next publisher deletes the noted files that are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from recstore_ops.config.directory import Directory
from recstore_ops.serving.checked_json import checked_json, parse_checked_json
from recstore_ops.serving.closed_json import fields_of, shown, texts
from recstore_ops.serving.following.names import BASES, CURRENT, UPDATES, Name
from recstore_ops.serving.following.publication import Base, Current, names_in
from recstore_ops.serving.following.update import Update

_LOCK, _NOTE = ".lock", ".unfinished.json"
WRITING = f"{BASES}/.writing"
"""The base that is being written."""

_FORMAT, _VERSION = "recstore publication's unfinished files", 1
_CUT_OFF = ("current.new", ".unfinished.new", f".{CURRENT}", f"{_NOTE}.new")
"""Names of unfinished files that a killed publisher may leave, those of earlier versions included."""
_OWN = (_LOCK, _NOTE, *_CUT_OFF, BASES, UPDATES)
_MAX_NOTE_BYTES = 1 << 30
"""A note lists the updates that a base had behind it, some 40 bytes each."""
_MIN_BYTES = 16 << 20
"""The least bytes of updates between two bases."""


class PublicationFiles:
    """The directory of a publication, for the one who writes it.

    Attributes:
        directory: it.
        current: what it says; None before its first base.
        bytes_written: of all updates.
        bytes_since_base: of the updates behind the newest base.
        is_open: whether this process writes.

    Raises:
        ValueError: something else is in the directory, or another process publishes to it.
        OSError: it cannot be written, or a file of it is damaged or no regular file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.current: Current | None = None
        self.bytes_since_base = self.bytes_written = self._base_bytes = 0
        self._noted: set[Name] = set()
        self.is_open = True
        self._held = Directory.create(directory)
        try:
            self._open()
        except BaseException:
            self._held.close()
            raise

    def _open(self) -> None:
        names = self._held.names()
        if CURRENT in names:
            self.current = Current.read(self.directory)
        elif strange := [name for name in names if name not in _OWN and not _is_of_system(name)]:
            raise ValueError(f"{self.directory} is no publication: it has {min(strange)} and no {CURRENT}")
        try:
            self._lock = self._held.lock(_LOCK)
        except BlockingIOError:
            raise ValueError(f"another publisher writes to {self.directory}") from None
        try:
            for folder in (BASES, UPDATES):
                self._held.create_subdirectory(folder).close()
            self._clean_up_after_another()
        except BaseException:
            self._lock.release()
            raise

    def newest_update(self) -> int:
        """Returns the number of the newest update, 0 before the first."""
        return 0 if self.current is None else self.current.update

    def note_base(self, base: Base) -> None:
        """Notes that a base is about to be there."""
        self._note([_name_of(base)])

    def write_base(self, base: Base, write: Callable[[Path], None]) -> None:
        """Has `write` write a bundle that is noted. It counts from the update on that makes it whole."""
        try:
            write(self.directory / WRITING)
            # A base gets its name when all of its files are there.
            self._held.rename(WRITING, base.name)
        except BaseException:
            with suppress(OSError):
                self._held.remove_tree(WRITING)
            raise
        tables = self.directory / base.name / "tables"
        self._base_bytes = sum(file.stat().st_size for file in tables.glob("*"))

    def drop_base(self) -> None:
        """Deletes a base that no update has made whole."""
        self._clean()

    def write_update(self, update: Update, base: Base | None) -> None:
        """Writes an update, and makes it the newest; `base` is the one that it makes whole, if it does."""
        size = self._write(update)
        before = self.current
        if base is None:
            assert before is not None, "the first update makes the first base whole"
            current = Current(before.base, update.number, before.previous)
        else:
            current = Current(base, update.number, before and (before.base, before.update))
            self.bytes_since_base = 0
            if before is not None:
                # Noted before the publication stops naming them: after a kill in between the next publisher finds them
                # in the note.
                self._note(name for name in names_in(self._held) if before.needs(name) and not current.needs(name))
        self._set(current)
        self.bytes_since_base += size
        self.bytes_written += size
        if base is not None:
            self._clean()

    def begin_history(self, history: str, write_base: Callable[[Path, Path], None], updates: Sequence[Update]) -> None:
        """Puts a base and updates of another history in the place of all that there are, with the same numbers.

        Args:
            history: its name.
            write_base: given the directory of the base that there is, and that of the one to be written.
            updates: all that follow the base that there is, in the other history.
        """
        # A publication can name one base before the newest, and the present one is about to become it.
        before = self._without_previous()
        base = replace(before.base, history=history)
        self.note_base(base)
        self.write_base(base, lambda directory: write_base(self.directory / before.base.name, directory))
        self._note(Name(UPDATES, update.number, history) for update in updates)
        for update in updates:
            self._write(update)
        self._set(Current(base, before.update, (before.base, before.update)))
        self._without_previous()

    def _write(self, update: Update) -> int:
        """Writes the file of an update, which a publisher that was cut off may have begun, and returns its bytes."""
        data = update.to_bytes()
        with suppress(FileNotFoundError):
            self._held.remove_file(update.name)
        try:
            with self._held.create_new(update.name) as file:
                file.write(data)
        except BaseException:
            with suppress(OSError):
                self._held.remove_file(update.name)
            raise
        return len(data)

    def _without_previous(self) -> Current:
        """Deletes the base before the current one, and what follows it only."""
        current = self.current
        assert current is not None, "there is a base before there is another"
        if current.previous is not None:
            without = replace(current, previous=None)
            # It says so until all are gone: whoever was cut off finds them by it.
            self._remove(name for name in names_in(self._held) if current.needs(name) and not without.needs(name))
            current = without
            self._set(current)
        return current

    def _set(self, current: Current) -> None:
        current.write(self._held)
        self.current = current

    def _note(self, names: Iterable[Name]) -> None:
        """Notes files that may be there and not be needed."""
        self._noted.update(names)
        text = checked_json({"files": sorted(map(str, self._noted))}, _FORMAT, _VERSION)
        self._held.replace(_NOTE, text.encode())

    def _clean(self) -> None:
        """Deletes what is noted and not needed, and then the note."""
        current = self.current
        # Files before the note: a kill in between leaves a note of files that are gone, which does no harm.
        self._remove(name for name in self._noted if current is None or not current.needs(name))
        with suppress(FileNotFoundError):
            self._held.remove_file(_NOTE)
        self._noted.clear()

    def _remove(self, names: Iterable[Name]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                if name.folder == BASES:
                    self._held.remove_tree(str(name))
                else:
                    self._held.remove_file(str(name))

    def _clean_up_after_another(self) -> None:
        with suppress(FileNotFoundError):
            self._held.remove_tree(WRITING)
        self._noted.update(self._read_note())
        self._clean()

    def _read_note(self) -> list[Name]:
        """Returns the names that an interrupted publisher noted.

        Raises:
            OSError: the note is damaged, or names something that is no file of a publication.
            ValueError: it has another version.
        """
        note = self.directory / _NOTE
        try:
            text = self._held.read(_NOTE, most=_MAX_NOTE_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        fields, _ = parse_checked_json(text, note, _FORMAT, _VERSION)
        try:
            files = texts(fields_of(fields, ("files",), "a note")["files"], "files")
        except ValueError as error:
            raise OSError(f"{note} is damaged: {error}") from None
        return [_noted_name(note, file) for file in files]

    def wants_base(self) -> bool:
        """Whether the updates behind the newest base take more than its tables do."""
        return self.bytes_since_base > max(self._base_bytes, _MIN_BYTES)

    def close(self) -> None:
        """Lets others write."""
        self.is_open = False
        self._lock.release()
        self._held.close()


def _is_of_system(name: str) -> bool:
    """Whether systems and editors put a name into directories, so that it says nothing of what these are for."""
    return name.startswith(".") or name == "lost+found"


def _name_of(base: Base) -> Name:
    return Name(BASES, base.after, base.history)


def _noted_name(note: Path, file: str) -> Name:
    if (name := Name.parse(file)) is None:
        raise OSError(f"{note} names {shown(file)}, which is no file of a publication")
    return name
