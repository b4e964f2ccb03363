"""The names of files in a publication. A name from a file or a peer is checked here before it is opened.

A history is 8 hexadecimal digits, a number is the number of an update. So no name leads out of the publication.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from recstore_ops.serving.closed_json import shown, whole
from recstore_ops.serving.manifest import is_file_of_a_bundle

CURRENT, BASES, UPDATES = "current.json", "bases", "updates"
MAX_NUMBER = 2**63 - 1

_HISTORY = re.compile(r"[0-9a-f]{8}")
_NUMBER = r"(0|[1-9][0-9]{0,18})"
_BASE = re.compile(rf"{BASES}/{_NUMBER}-({_HISTORY.pattern})")
_UPDATE = re.compile(rf"{UPDATES}/{_NUMBER}-({_HISTORY.pattern})\.update")


@dataclass(frozen=True)
class Name:
    """The name of a base or of an update.

    Attributes:
        folder: `BASES` or `UPDATES`.
        number: of the update, or of the last one before the base.
        history: the one that it belongs to.

    Raises:
        ValueError: the number or the history has another form.
    """

    folder: str
    number: int
    history: str

    def __post_init__(self) -> None:
        check_history(self.history)
        whole(self.number, 0, MAX_NUMBER, "the number of an update")

    def __str__(self) -> str:
        suffix = ".update" if self.folder == UPDATES else ""
        return f"{self.folder}/{self.number}-{self.history}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """Reads a name; None if it is another one."""
        for folder, pattern in ((BASES, _BASE), (UPDATES, _UPDATE)):
            if (found := pattern.fullmatch(text)) and int(found[1]) <= MAX_NUMBER:
                return cls(folder, int(found[1]), found[2])
        return None


def is_file_of_a_publication(text: str) -> bool:
    """Whether followers may ask for a file: an update, or one within a base."""
    if (name := Name.parse(text)) is not None:
        return name.folder == UPDATES
    folder, _, rest = text.partition("/")
    base, _, file = rest.partition("/")
    return _BASE.fullmatch(f"{folder}/{base}") is not None and is_file_of_a_bundle(file)


def check_history(history: object) -> str:
    """Returns the name of a history.

    Raises:
        ValueError: it has another form.
    """
    if not isinstance(history, str) or not _HISTORY.fullmatch(history):
        raise ValueError(f"a history is 8 hexadecimal digits, got {shown(history)}")
    return history
