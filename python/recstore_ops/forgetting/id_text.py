"""Ids as people write them: decimal numbers with commas, blanks or line ends between them."""

from __future__ import annotations

import re
from pathlib import Path

_BETWEEN, _ID = re.compile(r"[\s,]+"), re.compile(r"-?[0-9]+")


def read_ids(text: str, source: str) -> list[int]:
    """Returns the ids of a text.

    Args:
        text: decimal numbers.
        source: where it is from, for errors.

    Raises:
        ValueError: something else is in it.
    """
    words = [word for word in _BETWEEN.split(text) if word]
    if wrong := [word for word in words if not _ID.fullmatch(word)]:
        raise ValueError(f"{source}: ids are integers with commas or line ends between them, got {wrong[0]!r}")
    return [int(word) for word in words]


def read_ids_file(path: Path) -> list[int]:
    """Returns the ids of a file.

    Raises:
        ValueError: something else is in it.
        OSError: it cannot be read.
    """
    try:
        return read_ids(path.read_text(encoding="utf-8"), str(path))  # by path: the caller's own
    except UnicodeDecodeError:
        raise ValueError(f"{path}: ids are decimal numbers in a file of text") from None


__all__ = ["read_ids", "read_ids_file"]
