"""What a table of 10 million rows adds to the process, over its rows and slots; the bytes of indices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from benches.cells.stage import Stage
from benches.competitors.recstore import RecStoreTable
from benches.ids import DENSE, IN_RANDOM_ORDER, SPREAD, IdKind
from benches.measured import Figure
from benches.scale import Scale
from recstore_ops import table_statistics

CELL = "memory"
GROWTH = "growth of the process over rows and slots"

_ROWS, _DIM = 10_000_000, 16
_INDEXED_ROWS, _INDEXED_DIM = 1 << 23, 8  # Eight bytes a row fill huge pages without a rest.
_BYTES_PER_ROW = 8 + 2 / 8
"""What `index_bytes` counts beside the id map: a row's id, whether it is there, and whether it changed since a save."""
_INDEX_LIMITS: dict[IdKind, float] = {DENSE: _BYTES_PER_ROW + 0.2, IN_RANDOM_ORDER: 20, SPREAD: _BYTES_PER_ROW + 26}
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
    for kind, limit in _INDEX_LIMITS.items():
        yield Figure(CELL, f"index bytes an id, {kind}", _index_bytes(scale, kind), "bytes", f"<= {limit:g}")


def _index_bytes(scale: Scale, kind: IdKind) -> float:
    """Returns a table's `index_bytes` an id."""
    rows = scale.of(_INDEXED_ROWS)
    with RecStoreTable(rows, _INDEXED_DIM, kind=kind) as table:
        return table_statistics(table.module.name)["index_bytes"] / rows


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
