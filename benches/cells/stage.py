"""A stage: cases that share tables, opened once and freed before those of the next stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benches.measured import Case, Figure


@dataclass(frozen=True)
class Stage:
    """Cases that share tables.

    Attributes:
        cell: the group that an error before the first case belongs to.
        title: what is shown while the tables are filled.
        rounds: how many rounds its cases have in all, at most.
        open: fills the tables and gives the cases one by one; frees the tables at its end.
    """

    cell: str
    title: str
    rounds: int
    open: Callable[[], Iterator[Case | Figure]]

    @property
    def key(self) -> str:
        """What tells it from all other stages."""
        return f"{self.cell}: {self.title}"
