"""Where rows of several tables lie as ranks send them: for each rank one table after the other, and flags behind them.

Shape suffixes: W ranks, T tables, U distinct ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch import Tensor

FLAGS = 16
"""The elements behind the rows for each rank, as the operators have them: the first one is a flag."""


@dataclass(frozen=True)
class Layout:
    """As many rows of each rank and table, in one tensor of one dimension.

    Attributes:
        counts_WT: the rows of each table, by rank.
        dims: of the tables.
    """

    counts_WT: list[list[int]]
    dims: list[int]

    @cached_property
    def counts(self) -> list[int]:
        """The rows of each table of the first rank, then of the second, and so on."""
        return list(chain.from_iterable(self.counts_WT))

    @cached_property
    def sizes_W(self) -> list[int]:
        """The elements of each rank, flags included."""
        return [
            sum(count * dim for count, dim in zip(counts, self.dims, strict=True)) + FLAGS for counts in self.counts_WT
        ]

    @cached_property
    def ends_W(self) -> list[int]:
        """The place behind the elements of each rank."""
        return list(accumulate(self.sizes_W))

    def of_tables(self, numbers: Sequence[int]) -> Layout:
        """The same of some tables."""
        if len(numbers) == len(self.dims):
            return self
        return Layout([[counts[number] for number in numbers] for counts in self.counts_WT], self._of(numbers))

    def _of(self, numbers: Sequence[int]) -> list[int]:
        return [self.dims[number] for number in numbers]

    @property
    def runs_WR(self) -> list[list[tuple[int, int]]]:
        """Numbers of rows and their dims, by rank: one run where all dims are equal, else one a table."""
        if len(set(self.dims)) == 1:
            return [[(sum(counts), self.dims[0])] for counts in self.counts_WT]
        return [list(zip(counts, self.dims, strict=True)) for counts in self.counts_WT]

    def runs(self, flat: Tensor) -> list[list[Tensor]]:
        """The rows of each run, `[count, dim]`, by rank: views."""
        return [
            _cut(flat[end - size : end - FLAGS], runs)
            for runs, size, end in zip(self.runs_WR, self.sizes_W, self.ends_W, strict=True)
        ]

    def by_table(self, flat: Tensor) -> list[Tensor]:
        """Copies of the rows of each table, `[U, dim]`, those of the first rank first."""
        pieces = [
            _cut(flat[end - size : end - FLAGS], list(zip(counts, self.dims, strict=True)))
            for counts, size, end in zip(self.counts_WT, self.sizes_W, self.ends_W, strict=True)
        ]
        return [torch.cat(of_ranks) for of_ranks in zip(*pieces, strict=True)]

    def flat(self, by_table: Sequence[Tensor]) -> Tensor:
        """The same the other way round; flags are zero."""
        parts = [
            rows.split([counts[table] for counts in self.counts_WT]) if rows.numel() else (rows,) * len(self.counts_WT)
            for table, rows in enumerate(by_table)
        ]
        flags = torch.zeros(FLAGS, dtype=torch.float32, device="cpu")
        of_ranks = zip(*parts, strict=True) if parts else [()] * len(self.counts_WT)
        return torch.cat([part for of_rank in of_ranks for part in (*(rows.reshape(-1) for rows in of_rank), flags)])

    def empty(self) -> Tensor:
        """Zeros."""
        return torch.zeros(self.ends_W[-1], dtype=torch.float32, device="cpu")

    def set_flags(self, flat: Tensor, flag: int) -> None:
        """Sets the flag for each rank."""
        for end in self.ends_W:
            flat[end - FLAGS] = flag

    def flags_W(self, flat: Tensor) -> list[int]:
        """The flag of each rank."""
        return [int(flat[end - FLAGS]) for end in self.ends_W]


def _cut(flat: Tensor, runs: list[tuple[int, int]]) -> list[Tensor]:
    parts = flat.split([count * dim for count, dim in runs])
    return [part.view(count, dim) for part, (count, dim) in zip(parts, runs, strict=True)]
