"""Warnings that are about the line of the program's own code that called this package."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_NOT_OF_PROGRAMS = (__name__.partition(".")[0], "torch")


def warn_program(message: str) -> None:
    """Warns about the line of the program that called this package, each time.

    Python's default filter shows equal texts of one line once, and a cell that runs again would be silent.
    """
    frame = _frame_of_program()
    names = frame.f_globals
    warnings.warn_explicit(
        message, UserWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "__main__"), None
    )


def _frame_of_program() -> FrameType:
    """The innermost call that is not within this package or torch; the outermost one if all are."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_of_library(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame


def _is_of_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _NOT_OF_PROGRAMS
