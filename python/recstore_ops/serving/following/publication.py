"""The directory of a publication: bundles, and what changed since.

publication/current.json                    what there is
publication/bases/7-3f2a9c1e/               a bundle with the tables as they were at about update 7
publication/updates/8-3f2a9c1e.update       what changed between updates 7 and 8

A publisher that begins anew begins a *history*: its updates follow its own bases only. A base is written while the
tables train, so its rows come from several steps. The updates behind it have all changes of that time, so it is
consistent from update `until` on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recstore_ops.config.directory import Directory
from recstore_ops.serving.checked_json import checked_json, parse_checked_json
from recstore_ops.serving.closed_json import fields_of, shown, typed, whole
from recstore_ops.serving.following.names import BASES, CURRENT, MAX_NUMBER, UPDATES, Name, check_history

MAX_CURRENT_BYTES = 4096
"""The most bytes of the file that describes a publication, which takes some hundred."""

_FORMAT, _VERSION = "recstore publication", 1


@dataclass(frozen=True)
class Base:
    """A bundle, and the updates that make it whole.

    Attributes:
        history: the history that it belongs to.
        after: the last update whose changes it has for sure.
        until: the first update at which it is the state of one step.

    Raises:
        ValueError: a field has another form, or there is no update between both.
    """

    history: str
    after: int
    until: int

    def __post_init__(self) -> None:
        check_history(self.history)
        if whole(self.until, 0, MAX_NUMBER, "until") <= whole(self.after, 0, MAX_NUMBER, "after"):
            raise ValueError(f"a base becomes whole by an update after {self.after}, got until {self.until}")

    @property
    def name(self) -> str:
        """Its directory within the publication."""
        return str(Name(BASES, self.after, self.history))


@dataclass(frozen=True)
class Segment:
    """A base, and the updates that follow it up to a number.

    Raises:
        ValueError: the last update does not make the base whole.
    """

    base: Base
    last: int

    def __post_init__(self) -> None:
        if whole(self.last, 0, MAX_NUMBER, "the number of an update") < self.base.until:
            raise ValueError(f"update {self.last} does not make a base whole that is so from {self.base.until} on")

    def has(self, name: Name) -> bool:
        """Whether a base or an update belongs to it."""
        if name.folder == BASES:
            return str(name) == self.base.name
        return name.history == self.base.history and self.base.after < name.number <= self.last


@dataclass(frozen=True)
class Current:
    """The contents of a publication.

    Attributes:
        base: the base from which a new follower begins.
        update: the number of the newest update.
        previous: the base before, and the number of the last update that follows it only.

    Raises:
        ValueError: the numbers do not fit each other.
    """

    base: Base
    update: int
    previous: tuple[Base, int] | None = None

    def __post_init__(self) -> None:
        if self.stretches()[-1].last > self.update:
            raise ValueError(f"update {self.update} is the newest, and the base before has later ones")

    @property
    def tag(self) -> str:
        """Another for whatever else the publication says."""
        return f"{self.base.after}-{self.base.history}-{self.update}"

    def stretches(self) -> list[Segment]:
        """The newest base and, if it is kept, the one before, each with its updates."""
        newest = Segment(self.base, self.update)
        return [newest] if self.previous is None else [newest, Segment(*self.previous)]

    def needs(self, name: Name) -> bool:
        """Whether followers may ask for a base or an update."""
        return any(stretch.has(name) for stretch in self.stretches())

    def write(self, directory: Directory) -> None:
        """Puts this in the place of what the publication said before, at once."""
        directory.replace(CURRENT, checked_json(asdict(self), _FORMAT, _VERSION).encode())

    @classmethod
    def parse(cls, text: str, whose: object) -> Current:
        """Reads what a publication says.

        Raises:
            ValueError: it is no publication, or one of another version.
            OSError: it is damaged.
        """
        fields, _ = parse_checked_json(text, whose, _FORMAT, _VERSION)
        try:
            return cls._of(fields)
        except ValueError as error:
            raise OSError(f"{whose} is damaged: {error}") from None

    @classmethod
    def _of(cls, fields: Any) -> Current:
        fields_of(fields, ("base", "update", "previous"), "a publication")
        if (previous := fields["previous"]) is not None:
            if len(typed(previous, list, "previous")) != 2:
                raise ValueError(f"previous: expected a base and a number, got {shown(previous)}")
            previous = (_base_of(previous[0], "previous[0]"), previous[1])
        return cls(_base_of(fields["base"], "base"), fields["update"], previous)

    @classmethod
    def read(cls, directory: Path) -> Current:
        """Reads what the publication in a directory says.

        Raises:
            ValueError: there is none, or one of another version.
            OSError: it is damaged.
        """
        return cls.parse(current_text(directory), directory / CURRENT)


def _base_of(fields: Any, what: str) -> Base:
    return Base(**fields_of(fields, ("history", "after", "until"), what))


def current_text(directory: Path) -> str:
    """Returns what the publication in a directory says, as it stands there.

    Raises:
        ValueError: there is none.
        OSError: it cannot be read, or is no regular file.
    """
    try:
        with Directory(directory) as held:
            return held.read(CURRENT, most=MAX_CURRENT_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        raise ValueError(f"{directory} is no publication: it has no {CURRENT}") from None


def names_in(directory: Directory) -> list[Name]:
    """Returns the bases and updates that lie in the directory of a publication, whether or not they are needed.

    Raises:
        OSError: it cannot be read.
    """
    listed = (f"{folder}/{name}" for folder in (BASES, UPDATES) for name in _listed(directory, folder))
    return [name for name in map(Name.parse, listed) if name is not None]


def _listed(directory: Directory, folder: str) -> list[str]:
    try:
        with directory.subdirectory(folder) as held:
            return held.names()
    except FileNotFoundError:
        return []
