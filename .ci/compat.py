"""Runs the op tests of one wheel on several releases of torch and writes docs/compat.md.

Each release gets an environment of its own, which is deleted before the next, for torch is large.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

TORCH_VERSIONS = ("2.11.0", "2.13.0", "2.15.0")
ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "python"
ENVIRONMENT = ROOT / "build" / "compat"
PINNED = ("hypothesis", "pytest", "pytest-timeout")


def main(wheel: Path) -> int:
    rows = [test_on(version, wheel) for version in TORCH_VERSIONS]
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "compat.md").write_text(page(wheel, rows), encoding="utf-8")
    print("\n".join(rows))
    return 0 if all("failed" not in row and "error" not in row for row in rows) else 1


def test_on(version: str, wheel: Path) -> str:
    """Returns the row of the table for one release of torch."""
    print(f"== {wheel.name} on torch {version}", flush=True)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        python = ENVIRONMENT / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"torch=={version}", *pinned_tools(), wheel], check=True)
        more = ("test_compile.py", "test_large_results.py")
        tests = [*sorted(TESTS.glob("test_*ops.py")), *(TESTS / name for name in more)]
        command = [python, "-m", "pytest", "--quiet", *tests]
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    finally:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    print(run.stdout, flush=True)
    return f"| {version} | {platform.python_version()} | {summary(run)} |"


def summary(run: subprocess.CompletedProcess[str]) -> str:
    """Returns pytest's last line, such as `41 passed, 2 skipped`, without warnings and time."""
    lines = run.stdout.strip().splitlines()
    if not lines or run.returncode > 1:
        return f"error: pytest exited with {run.returncode}"
    return re.sub(r"(, \d+ warnings?)? in [\d.]+s.*", "", lines[-1])


def pinned_tools() -> list[str]:
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split("==")[0] in PINNED]


def page(wheel: Path, rows: list[str]) -> str:
    table = "\n".join(["| torch | Python | tests of the operators |", "|---|---|---|", *rows])
    return f"""# One wheel, several releases of torch

`make compat` builds `{wheel.name}` once and
runs `test_*ops.py`, `test_compile.py` and `test_large_results.py` with it on:

{table}
"""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
