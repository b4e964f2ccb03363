"""Medians and percentiles of timed rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of some values, and where the lowest and the highest tenth of them begin."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarizes values.

        Raises:
            ValueError: there are none.
        """
        if not values:
            raise ValueError("no values to summarize")
        return cls(statistics.median(values), percentile(values, 10), percentile(values, 90))


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the value below which `percent` of the values lie, between the two nearest in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Returns the ratio of each round: a slow moment of the machine is in both values and cancels out."""
    return [value / other for value, other in zip(values, base, strict=True)]
