"""The settings in which lookups and steps in one table are measured: the axes of their cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benches.ids import Distribution
from benches.measured import Axis, OutputState

THOUSAND, MILLION = 1_000, 1_000_000
BATCH, LARGE_BATCH = 65_536, 1_048_576


@dataclass(frozen=True)
class Setting:
    """Sizes as in a full run, distribution of the ids, state of the output, threads."""

    rows: int = MILLION
    dim: int = 64
    batch: int = BATCH
    ids: Distribution = "uniform"
    output: OutputState = "cold"
    threads: int = 2

    def axes(self) -> dict[str, Axis]:
        """The setting as columns of the report."""
        return {
            "rows": self.rows,
            "dim": self.dim,
            "ids a batch": self.batch,
            "ids": self.ids,
            "output": self.output,
            "threads": self.threads,
        }

    @property
    def calls(self) -> int:
        """Calls in one timing: a call of a few ids is too short for the clock."""
        return max(1, min(64, 4_096 // self.batch))


def _on_one_and_two_threads(settings: Iterable[Setting]) -> list[Setting]:
    return [replace(setting, threads=threads) for setting in settings for threads in (1, 2)]


STEPS = [
    *_on_one_and_two_threads([Setting(), Setting(ids="zipf")]),
    *[Setting(batch=batch) for batch in (1, 256)],
    *_on_one_and_two_threads([Setting(batch=batch) for batch in (4_096, LARGE_BATCH)]),
    *_on_one_and_two_threads([Setting(rows=8 * MILLION), Setting(rows=8 * MILLION, ids="zipf")]),
    *_on_one_and_two_threads([Setting(rows=100 * THOUSAND)]),
    *_on_one_and_two_threads([Setting(dim=dim) for dim in (8, 16, 128)]),
]
"""Settings of `step`; their order is the order of the report."""

LOOKUPS = [
    *STEPS,
    *_on_one_and_two_threads(
        Setting(rows=rows, ids=skew, output="hot") for rows in (MILLION, 8 * MILLION) for skew in ("uniform", "zipf")
    ),
]
"""Settings of `lookup`: those of `step`, and those with an output that was just written."""


def tables_of(settings: Iterable[Setting]) -> list[tuple[int, int]]:
    """Returns the distinct (rows, dim), the smallest tables first."""
    return sorted({(setting.rows, setting.dim) for setting in settings}, key=lambda table: (table[0] * table[1], table))
