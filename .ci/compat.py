"""Runs the op tests of one wheel on several releases of torch and writes docs/compat.md.

Each release gets an environment of its own, which is deleted before the next, for torch is large. It also writes a
bundle, and answers those of the releases before.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

# The one of development comes first: all others answer its bundle.
TORCH_VERSIONS = ("2.13.0", "2.11.0", "2.15.0")
ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "python"
ENVIRONMENT = ROOT / "build" / "compat"
BUNDLES = ROOT / "build" / "compat-bundles"
PINNED = ("hypothesis", "pytest", "pytest-timeout")


def main(wheel: Path) -> int:
    shutil.rmtree(BUNDLES, ignore_errors=True)
    rows = sorted(test_on(version, wheel) for version in TORCH_VERSIONS)
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
        subprocess.run([*install, f"torch=={version}", *pinned_tools(), f"{wheel}[train]"], check=True)
        more = (
            "test_compile.py",
            "test_large_results.py",
            "test_bundles.py",
            "test_frozen_tables.py",
            "test_program_graphs.py",
        )
        tests = [*sorted(TESTS.glob("test_*ops.py")), *(TESTS / name for name in more)]
        command = [python, "-m", "pytest", "--quiet", *tests]
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        answered = exchange_bundles(version, python)
    finally:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    print(run.stdout, flush=True)
    return f"| {version} | {platform.python_version()} | {summary(run)} | {answered} |"


def exchange_bundles(version: str, python: Path) -> str:
    """Writes a bundle with one release of torch, and says whose bundles it answers as the models that were written."""

    def succeeds(what: str, folder: Path) -> bool:
        return subprocess.run([python, ROOT / ".ci" / "compat_bundle.py", what, folder], cwd=ROOT).returncode == 0

    own = BUNDLES / version
    own.mkdir(parents=True)
    if not succeeds("write", own):
        return "failed to write one"
    return ", ".join(each.name if succeeds("read", each) else f"{each.name}: failed" for each in BUNDLES.iterdir())


def summary(run: subprocess.CompletedProcess[str]) -> str:
    """Returns pytest's last line, such as `41 passed, 2 skipped`, without warnings and time."""
    lines = run.stdout.strip().splitlines()
    if not lines or run.returncode not in (0, 1):
        return f"error: pytest exited with {run.returncode}"
    return re.sub(r"(, \d+ warnings?)? in [\d.]+s.*", "", lines[-1])


def pinned_tools() -> list[str]:
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split("==")[0] in PINNED]


_HEAD = "| torch | Python | tests of operators and frozen tables | answers bundles of, to the bit |"


def page(wheel: Path, rows: list[str]) -> str:
    table = "\n".join([_HEAD, "|---|---|---|---|", *rows])
    return f"""# One wheel, several releases of torch

`make compat` builds `{wheel.name}` once and
runs the tests of operators, of compiled models, of frozen tables and of the graphs of bundles with it. Each release
writes a bundle and answers it, and those of the releases that ran before it:

{table}
"""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
