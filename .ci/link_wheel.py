#!/usr/bin/env python3
"""The linker of wheels for Linux: it links what g++ and rustc compiled against the symbols of an older glibc.

Zig brings those symbols. The C++ library stays that of the system, by its path: zig would put in its own, which unwinds
the stack in another way than libtorch's, and the first exception that an operator raises would end the process.

Of the module's symbols it exports the one that Python calls. rustc would export every function of a crate that has a
name of C, and with it code that nothing reaches.

CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=.ci/link_wheel.py CXXFLAGS="-include .ci/older_streams.h" cargo build ...
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

GLIBC = "2.28"
# By their names zig takes these for libraries of its own.
OF_THE_SYSTEM = {"-lstdc++": "libstdc++.so.6", "-lgcc_s": "libgcc_s.so.1"}
CXX = os.environ.get("CXX", "c++")
MODULE = "PyInit__native"
VERSION_SCRIPT = "-Wl,--version-script="


def main(arguments: list[str]) -> int:
    """Links as these arguments of `cc` say."""
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    with tempfile.TemporaryDirectory() as folder:
        missing = Path(folder) / "older_symbols.o"
        source = Path(__file__).with_name("older_symbols.cpp")
        subprocess.run([CXX, "-c", "-O2", "-fPIC", str(source), "-o", str(missing)], check=True)
        given = [_given(each, Path(folder)) for each in arguments]
        # The system's C++ library asks for symbols that are newer than those that are linked here.
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-Wl,--allow-shlib-undefined"]
        return subprocess.run([*command, *given, str(missing)]).returncode


def _given(argument: str, folder: Path) -> str:
    """Returns what takes the place of an argument."""
    if argument in OF_THE_SYSTEM:
        return _library(OF_THE_SYSTEM[argument])
    if argument.startswith(VERSION_SCRIPT) and MODULE in Path(argument.removeprefix(VERSION_SCRIPT)).read_text():
        script = folder / "exported"
        script.write_text(f"{{ global: {MODULE}; local: *; }};\n")
        return f"{VERSION_SCRIPT}{script}"
    return argument


def _library(name: str) -> str:
    """Returns where the compiler has a library."""
    asked = subprocess.run([CXX, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return asked.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
