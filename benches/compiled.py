"""Compiles a source of this folder on first use, into `build/bench`, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BUILD = FOLDER.parent / "build" / "bench"

_COMPILERS = {".c": ("CC", "cc"), ".cpp": ("CXX", "c++")}
"""The environment variable that names the compiler, and its name otherwise."""


@functools.cache
def load(name: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Returns the functions of a source; calling one lets go of the interpreter's lock.

    Args:
        name: of the file, `.c` or `.cpp`.
        flags: the compiler's.

    Raises:
        RuntimeError: there is no compiler, or it refuses the source.
    """
    source = FOLDER / name
    told_apart_by = f"{source.read_text(encoding='utf-8')} {flags} {platform.node()} {platform.machine()}"
    path = BUILD / f"{source.stem}-{hashlib.sha256(told_apart_by.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        _compile(source, flags, path)
    return ctypes.CDLL(str(path))


def _compile(source: Path, flags: Sequence[str], path: Path) -> None:
    """Compiles beside the place and renames, so that two processes may do so at once."""
    variable, default = _COMPILERS[source.suffix]
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        compiled = Path(folder) / path.name
        command = [os.environ.get(variable, default), str(source), *flags, "-shared", "-fPIC", "-o", str(compiled)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise RuntimeError(f"{source.name} needs a compiler; there is no {command[0]}") from None
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
        compiled.rename(path)
