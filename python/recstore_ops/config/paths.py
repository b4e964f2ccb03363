"""Paths as users write them, with `~` for a home directory, and files that a command writes for its user."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path


def user_path(path: str | PathLike[str], what: str = "path") -> str:
    """Returns a path with the home directory in the place of `~` or `~user`.

    Args:
        path: of a file or directory that need not exist.
        what: the name of the argument or option that gave it, for errors.

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


def check_output_file(path: Path, endings: Collection[str], *, replaces: bool) -> None:
    """Checks the place of a file before the work on it.

    Args:
        path: of the file.
        endings: those that are written.
        replaces: whether there may be such a file, to be replaced.

    Raises:
        ValueError: it has another ending, there is such a file or a directory of its name, or no file can be made
            there.
    """
    if path.suffix not in endings:
        raise ValueError(f"expected an output that ends in {' or '.join(endings)}, got {path}")
    if path.is_dir():
        raise ValueError(f"{path} is a directory; the output must be a file")
    if path.exists() and not replaces:
        raise ValueError(f"{path} exists already; --replace replaces it")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be written: no file can be made in {path.parent}")


@contextmanager
def replacing(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Gives an empty file beside each path, of a name that no file had.

    It takes the path's place in the end, and is removed if there is an error.

    Raises:
        OSError: a file cannot be made; the error names the path.
    """
    beside: list[Path] = []
    try:
        for path in paths:
            beside.append(_new_file_beside(path))
        yield beside
        for new, path in zip(beside, paths, strict=True):
            new.replace(path)
    except BaseException:
        for new in beside:
            new.unlink(missing_ok=True)
        raise


def _new_file_beside(path: Path) -> Path:
    # The dot hides it from readers of a directory.
    beside = path.with_name(f".recstore-{secrets.token_hex(8)}.new")
    try:
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:
        error.filename = str(path)
        raise
    return beside


__all__ = ["check_output_file", "replacing", "user_path"]
