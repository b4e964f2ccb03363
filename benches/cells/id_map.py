"""The id map alone: figures of a Rust program of this repository, one JSON object a line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benches.cells.stage import Stage
from benches.measured import Figure
from benches.scale import Scale

CELL = "id_map"

_ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("cargo", "bench", "--quiet", "-p", "recstore", "--bench", "id_map", "--features", "internals")
ENVIRONMENT = {
    "RUSTFLAGS": "-C target-cpu=native",
    "CARGO_TARGET_DIR": str(_ROOT / "build" / "bench-target"),
}


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, "the id map, in Rust", 1, lambda: figures(COMMAND, ENVIRONMENT))]


def figures(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Figure]:
    """Runs the program and gives its figures.

    Raises:
        RuntimeError: the program is not there or failed.
        ValueError: a line that is no figure, or none at all.
    """
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"there is no {command[0]}; install a Rust toolchain")
    done = subprocess.run(command, cwd=_ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    yield from parsed(done.stdout.splitlines())


def parsed(lines: Iterable[str]) -> list[Figure]:
    """Reads lines of `{"cell": str, "value": float, "unit": str, "limit": str}`; empty lines are none.

    Raises:
        ValueError: a line that is no figure, or none at all.
    """
    found = [_figure(line) for line in lines if line.strip()]
    if not found:
        raise ValueError("the program of the id map printed no figure")
    return found


def _figure(line: str) -> Figure:
    try:
        figure = json.loads(line)
        return Figure(CELL, figure["cell"], float(figure["value"]), figure["unit"], figure.get("limit", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a figure of the id map: {line!r}") from error
