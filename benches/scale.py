"""How large a run is: the real sizes, or tiny ones that only show that everything runs."""

from __future__ import annotations

from dataclasses import dataclass

from benches.measured import Plan


@dataclass(frozen=True)
class Scale:
    """What sizes are divided by, and how long cases are measured.

    Attributes:
        divisor: of rows and of ids a batch.
        lookups: for cases of a few milliseconds.
        steps: for cases in which somebody takes tens of milliseconds.
    """

    divisor: int
    lookups: Plan
    steps: Plan

    @property
    def is_full(self) -> bool:
        """Whether figures mean anything."""
        return self.divisor == 1

    def of(self, count: int) -> int:
        """That many rows, ids or calls in this run; at least 1."""
        return max(1, count // self.divisor)


FULL = Scale(1, lookups=Plan(61, 15), steps=Plan(31, 20))
QUICK = Scale(500, lookups=Plan(1, 1, 1), steps=Plan(1, 1, 1))
