"""Puts a directory in the place of another one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_HERE, _EXCHANGE = -100, 2
"""`AT_FDCWD` and `RENAME_EXCHANGE` of Linux."""


def exchange(new: Path, old: Path) -> None:
    """Exchanges the names of two directories of one file system.

    If the system supports it, this is one atomic move: even if the process is killed, each name has one of the two.

    Raises:
        OSError: a directory cannot be renamed; both keep their names.
    """
    if not _is_exchanged(new, old):
        aside = new.with_name(f"{new.name}.aside")
        old.rename(aside)
        try:
            new.rename(old)
        except OSError:
            aside.rename(old)
            raise
        aside.rename(new)


def _is_exchanged(new: Path, old: Path) -> bool:
    """Exchanges them in one move. Returns False if the system, or its file system, cannot do that."""
    move = getattr(ctypes.CDLL(None), "renameat2", None)
    return move is not None and move(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE) == 0
