"""Looks at a wheel before it goes out: its size, what it requires, the systems that it runs on, the licences in it.

python .ci/check_wheel.py dist/recstore_ops-*.whl
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

INSTALLED_BYTES = 17_500_000
PLATFORM = f"manylinux_2_28_{platform.machine()}"
REQUIRED = {"torch", "numpy"}
SHIPPED = ("licenses/LICENSE", "licenses/third_party/LICENSES.txt", "sboms/recstore-ops.cdx.json")


def problems_of(wheel: Path) -> Iterator[str]:
    """Yields what is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        size = sum(entry.file_size for entry in files.infolist())
        metadata = files.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installed {size / 1e6:.1f} MB")
    if size > INSTALLED_BYTES:
        yield f"it takes {size:,} bytes when it is installed, and may take {INSTALLED_BYTES:,}"
    required = set(re.findall(r"^Requires-Dist: ([\w-]+)(?![^\n]*extra)", metadata, re.MULTILINE))
    if required != REQUIRED:
        yield f"it requires {sorted(required)}, and should require {sorted(REQUIRED)}"
    for suffix in SHIPPED:
        if not any(name.endswith(f".dist-info/{suffix}") for name in names):
            yield f"it lacks {suffix}"
    if sys.platform == "linux":
        yield from platform_problems(wheel)


def platform_problems(wheel: Path) -> Iterator[str]:
    """Yields why a wheel would not run on every system of its tag; torch brings its own libraries."""
    if PLATFORM not in wheel.name:
        yield f"it is not tagged {PLATFORM}"
    with tempfile.TemporaryDirectory() as folder:
        audit = ["auditwheel", "repair", "--plat", PLATFORM, "--exclude", "libtorch*", "--exclude", "libc10*"]
        command = [sys.executable, "-m", *audit, "--wheel-dir", folder, str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        yield f"auditwheel: {done.stderr.strip().splitlines()[-1]}"
    with zipfile.ZipFile(wheel) as files:
        modules = [name for name in files.namelist() if name.endswith(".so")]
        for module in modules:
            if b"libstdc++.so.6" not in files.read(module):
                yield f"{module} has a C++ library of its own: exceptions would not come through torch"


def main() -> int:
    """Checks the wheels that are named, and prints what is wrong."""
    found = [f"{name}: {problem}" for name in sys.argv[1:] for problem in problems_of(Path(name))]
    print("\n".join(found) if found else f"as it should be: {', '.join(sys.argv[1:])}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
