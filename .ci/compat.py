"""Runs the op tests of one wheel on several releases of torch, or of Python, and writes docs/compat.md.

Each gets an environment of its own, which is deleted before the next, for torch is large. It also writes a bundle, and
answers those of the releases before. Runs of the same wheel add their rows to the page's, those on other systems too if
the page is taken there and back.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# The one of development comes first: all others answer its bundle.
TORCH_VERSIONS = ("2.13.0", "2.11.0", "2.15.0")
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compat.md"
TESTS = ROOT / "tests" / "python"
ENVIRONMENT = ROOT / "build" / "compat"
BUNDLES = ROOT / "build" / "compat-bundles"
PINNED = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", nargs="+", default=TORCH_VERSIONS, help="releases of torch [%(default)s]")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters [the one that runs this]")
    options = parser.parse_args()
    wheel = options.wheel.resolve()
    shutil.rmtree(BUNDLES, ignore_errors=True)
    rows = []
    for python in options.python:
        for version in options.torch:
            rows.append(test_on(version, python, wheel))
            # At once: a run takes minutes, and a later one may break off.
            known = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
            PAGE.write_text(page(wheel, [*rows_of(wheel, known), *rows]), encoding="utf-8")
    print("\n".join(rows))
    return 0 if all("failed" not in row and "error" not in row for row in rows) else 1


def test_on(version: str, interpreter: str, wheel: Path) -> str:
    """Returns the row of the table for one release of torch and one interpreter."""
    print(f"== {wheel.name} on torch {version}, {interpreter}", flush=True)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    try:
        subprocess.run([interpreter, "-m", "venv", ENVIRONMENT], check=True)
        python = ENVIRONMENT / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"torch=={version}", *pinned_tools(), f"{wheel}[train]"], check=True)
        more = (
            "test_compile.py",
            "test_large_results.py",
            "test_bundles.py",
            "test_frozen_tables.py",
            "test_graph_operators.py",
            "test_program_graphs.py",
        )
        tests = [*sorted(TESTS.glob("test_*ops.py")), *(TESTS / name for name in more)]
        command = [python, "-m", "pytest", "--quiet", "-n", "2", "--dist", "loadfile", *tests]
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        on = f"{version} | {described(python)}"
        answered = exchange_bundles(on.replace(" | ", "-"), python)
    finally:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    print(run.stdout, flush=True)
    return f"| {on} | {summary(run)} | {answered} |"


def described(python: Path) -> str:
    """Returns the releases of an interpreter and of its C library, as the table has them."""
    program = "import platform; print(platform.python_version(), platform.libc_ver()[1], sep=' | ')"
    return subprocess.run([python, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def exchange_bundles(name: str, python: Path) -> str:
    """Writes a bundle, and says of how many of those that were written so far the answers are those of their models."""

    def succeeds(what: str, folder: Path) -> bool:
        return subprocess.run([python, ROOT / ".ci" / "compat_bundle.py", what, folder], cwd=ROOT).returncode == 0

    own = BUNDLES / name
    own.mkdir(parents=True)
    if not succeeds("write", own):
        return "failed to write one"
    written = sorted(BUNDLES.iterdir())
    failed = [each.name for each in written if not succeeds("read", each)]
    return f"failed: {', '.join(failed)}" if failed else f"{len(written)} of {len(written)}"


def summary(run: subprocess.CompletedProcess[str]) -> str:
    """Returns pytest's last line, such as `41 passed, 2 skipped`, without warnings and time."""
    lines = run.stdout.strip().splitlines()
    if not lines or run.returncode not in (0, 1):
        return f"error: pytest exited with {run.returncode}"
    return re.sub(r"(, \d+ warnings?)? in [\d.]+s.*", "", lines[-1])


def pinned_tools() -> list[str]:
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split("==")[0] in PINNED]


_HEAD = "| torch | Python | glibc | tests of operators and frozen tables | bundles answered to the bit |"


def rows_of(wheel: Path, known: str) -> list[str]:
    """Returns the rows of a page, if it is about this wheel."""
    return re.findall(r"^\| \d.*$", known, flags=re.MULTILINE) if digest(wheel) in known else []


def digest(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]


def page(wheel: Path, rows: Iterable[str]) -> str:
    newest = {tuple(row.split(" | ")[:3]): row for row in rows}
    table = "\n".join([_HEAD, "|---|---|---|---|---|", *sorted(newest.values(), key=releases)])
    return f"""# One wheel, several releases of torch and Python

`make compat` builds `{wheel.name}` once (SHA-256
`{digest(wheel)}`...) and runs the tests of operators, of compiled models, of frozen tables and of the graphs of bundles
with it. Each run writes a bundle and answers it, and those that were written before it:

{table}
"""


def releases(row: str) -> list[int]:
    """Returns the releases that begin a row, to sort by."""
    return [int(number) for number in re.findall(r"\d+", " ".join(row.split(" | ")[:3]))]


if __name__ == "__main__":
    sys.exit(main())
