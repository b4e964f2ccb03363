"""Checks that rooms whose files others may have written open them through `Directory`, which follows no link.

Whoever opens a path all the same says so on that line: `# by path: why`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("python/recstore_ops")
ROOMS = ("checkpoint", "forgetting", "inspect", "serving")
OF_RUNS = (
    *("run/checkpoints", "run/row_form", "run/saved_run"),
    *("report/html_page", "report/plots", "report/recorded_run", "report/run_directory"),
)
OPENING = {
    *(
        "open",
        "read_text",
        "read_bytes",
        "write_text",
        "write_bytes",
        "touch",
        "unlink",
        "rmtree",
        "remove",
        "truncate",
    ),
    *("copyfile", "copytree", "symlink_to", "hardlink_to"),
}
HELD = (
    *("archive", "connections", "directory", "file", "files", "folder", "held", "log", "made", "open", "run", "shard"),
    *("source", "target", "there"),
)
"""What directories that are held open are called, and files."""

MARK = "# by path:"


def main(root: Path) -> int:
    faults = list(faults_of(root))
    for fault in faults:
        print(f"opened_files: {fault}", file=sys.stderr)
    return 1 if faults else 0


def faults_of(root: Path) -> Iterator[str]:
    for file in checked_files(root / PACKAGE):
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines()
        for line, name in calls_in(text):
            if MARK not in lines[line - 1]:
                yield f"{file.relative_to(root)}:{line}: {name}() follows links: use config.directory.Directory"


def checked_files(package: Path) -> list[Path]:
    """Returns the files whose calls are looked at."""
    of_rooms = [file for room in ROOMS for file in sorted((package / room).rglob("*.py"))]
    return [*of_rooms, *(package / "training" / f"{name}.py" for name in OF_RUNS)]


def calls_in(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and name of each call that opens, changes or removes a file by its path."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (name := called(node.func)) in OPENING:
            yield node.lineno, name


def called(function: ast.expr) -> str:
    """The name of what is called by a path; nothing for methods of what is held open."""
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    held = ast.unparse(function.value)
    is_held = held.rpartition(".")[2].lstrip("_") in HELD or held.startswith("Table")
    return "" if is_held else function.attr


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
