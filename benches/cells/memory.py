"""What a table of 10 million rows adds to the process, over the bytes of its rows and slots."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from benches.cells.stage import Stage
from benches.measured import Figure
from benches.scale import Scale

CELL = "memory"
GROWTH = "growth of the process over rows and slots"

_ROWS, _DIM = 10_000_000, 16
_ROOT = Path(__file__).resolve().parents[2]


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, f"{_ROWS:,} rows of {_DIM} in a process of their own", 1, lambda: _figures(scale))]


def _figures(scale: Scale) -> Iterator[Figure]:
    rows = scale.of(_ROWS)
    needed = rows * _DIM * 2 * 4
    grown = growth(rows, _DIM)
    yield Figure(CELL, GROWTH, grown / needed, "x", "<= 1.3")
    yield Figure(CELL, "growth of the process a row", grown / rows, "bytes")


def growth(rows: int, dim: int) -> int:
    """Returns how many bytes a process grows by while it fills a table with rows and their AdaGrad state.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-m", "benches.cells.memory_process", str(rows), str(dim)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the process that fills a table failed: {done.stderr.strip()[-500:]}")
    return int(done.stdout)
