"""Bounds of the sizes that a program takes."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """The bounds of a size; one without an upper bound has None."""

    least: int
    most: int | None

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} or more"
        return f"{self.least} to {self.most}" if self.least else f"{self.most} or less"

    def has(self, size: int) -> bool:
        """Whether a size lies within them."""
        return self.least <= size and (self.most is None or size <= self.most)
