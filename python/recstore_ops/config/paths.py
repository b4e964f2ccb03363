"""Paths as users write them: `~` is a home directory, and an empty text is no path."""

from __future__ import annotations

import os
from os import PathLike


def user_path(path: str | PathLike[str], what: str = "path") -> str:
    """Returns a path with the home directory in the place of `~` or `~user`.

    Args:
        path: of a file or directory that need not exist.
        what: what it is called where it was given, for errors.

    Raises:
        ValueError: an empty text, or a user without a home directory here.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError(f'{what} must name a file or directory, got ""; "." is the working directory')
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        user = text.partition("/")[0]
        raise ValueError(f'{what}: there is no home directory "{user}"; a file of that name is "./{text}"')
    return expanded


__all__ = ["user_path"]
