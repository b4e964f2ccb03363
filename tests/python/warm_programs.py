"""Programs in processes of their own that find torch and the package imported, but nothing done with them.

Their tables, their store and their end are those of `python -c`; what a program imports first is for `subprocess`.
"""

from __future__ import annotations

import ctypes
import sys
import traceback
import types
import warnings
from pathlib import Path

from warm_processes import Ended, WarmProcess


class WarmProgram(WarmProcess):
    """A running `python -W warns -c code arguments`."""

    def __init__(
        self, code: str, *arguments: object, cwd: Path | None = None, warns: str = "default", splits: bool = False
    ) -> None:
        super().__init__(_run, code, [str(argument) for argument in arguments], warns, cwd=cwd, splits=splits)


def run_program(code: str, *arguments: object, cwd: Path | None = None, warns: str = "default") -> Ended:
    """Runs a program to its end, within `cwd`."""
    return WarmProgram(code, *arguments, cwd=cwd, warns=warns, splits=True).ended()


def output_of(code: str, *arguments: object, cwd: Path | None = None, warns: str = "default") -> str:
    """What a program prints, which must end well."""
    ended = run_program(code, *arguments, cwd=cwd, warns=warns)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _run(code: str, arguments: list[str], warns: str) -> None:
    sys.argv = ["-c", *arguments]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(warns)  # pyright: ignore[reportArgumentType]
            exec(compile(code, "<string>", "exec"), vars(program))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    # Ends the interpreter, with what it does then; the end of a process of `multiprocessing` leaves that out.
    ctypes.pythonapi.Py_Exit(status)
