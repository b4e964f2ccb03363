"""The settings in which lookups and steps in one table are measured: the axes of their cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benches.ids import IN_RANDOM_ORDER, KINDS, SPREAD, Distribution, IdKind
from benches.measured import Axis, OutputState

THOUSAND, MILLION = 1_000, 1_000_000
BATCH, LARGE_BATCH = 65_536, 1_048_576


Table = tuple[int, int, IdKind]
"""Rows, dim, and the kind of its ids."""


@dataclass(frozen=True)
class Setting:
    """Sizes as in a full run, how rows are drawn, state of the output, threads, kind of the ids."""

    rows: int = MILLION
    dim: int = 64
    batch: int = BATCH
    drawn: Distribution = "uniform"
    output: OutputState = "cold"
    threads: int = 2
    ids: IdKind = SPREAD

    def axes(self) -> dict[str, Axis]:
        """The setting as columns of the report."""
        return {
            "rows": self.rows,
            "dim": self.dim,
            "ids a batch": self.batch,
            "drawn": self.drawn,
            "output": self.output,
            "threads": self.threads,
            "ids": self.ids,
        }

    @property
    def table(self) -> Table:
        """The table that it is measured in."""
        return self.rows, self.dim, self.ids

    @property
    def calls(self) -> int:
        """Calls in one timing: a call of a few ids is too short for the clock."""
        return max(1, min(64, 4_096 // self.batch))


def of_each_kind(settings: Iterable[Setting]) -> list[Setting]:
    """Returns the settings with dense ids, then those with spread ones."""
    settings = list(settings)
    return [replace(setting, ids=kind) for kind in KINDS for setting in settings]


def _on_one_and_two_threads(settings: Iterable[Setting]) -> list[Setting]:
    return [replace(setting, threads=threads) for setting in settings for threads in (1, 2)]


STEPS = of_each_kind(
    [
        *_on_one_and_two_threads([Setting(), Setting(drawn="zipf")]),
        *[Setting(batch=batch) for batch in (1, 256)],
        *_on_one_and_two_threads([Setting(batch=batch) for batch in (4_096, LARGE_BATCH)]),
        *_on_one_and_two_threads([Setting(rows=8 * MILLION), Setting(rows=8 * MILLION, drawn="zipf")]),
        *_on_one_and_two_threads([Setting(rows=100 * THOUSAND)]),
        *_on_one_and_two_threads([Setting(dim=dim) for dim in (8, 16, 128)]),
    ]
)
"""Settings of `step`; within a table their order is the order of the report."""

_HOT = [Setting(rows=rows, drawn=skew, output="hot") for rows in (MILLION, 8 * MILLION) for skew in ("uniform", "zipf")]

LOOKUPS = [
    *STEPS,
    *of_each_kind(_on_one_and_two_threads(_HOT)),
    *_on_one_and_two_threads([Setting(dim=16, ids=IN_RANDOM_ORDER)]),
]
"""Settings of `lookup`: those of `step`, those with an output that was just written, and rows in random order."""


def tables_of(settings: Iterable[Setting]) -> list[Table]:
    """Returns the distinct tables, the smallest first."""
    return sorted({setting.table for setting in settings}, key=lambda table: (table[0] * table[1], table))
