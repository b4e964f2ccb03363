"""How figures are written: times in the unit in which they read best, spreads, ratios, axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benches.measured import Axis
from benches.spread import Spread

ABSENT = "-"

_UNITS = ((1e3, 1.0, "ns"), (1e6, 1e3, "us"), (float("inf"), 1e6, "ms"))


def time_with_spread(nanoseconds: Spread | None) -> str:
    """`1.62 ms (1.55..1.80)`: the median, and p10 to p90 in the same unit."""
    if nanoseconds is None:
        return ABSENT
    divisor, unit = next((divisor, unit) for below, divisor, unit in _UNITS if nanoseconds.median < below)
    median, p10, p90 = (
        significant(value / divisor) for value in (nanoseconds.median, nanoseconds.p10, nanoseconds.p90)
    )
    return f"{median} {unit} ({p10}..{p90})"


def ratio(spread: Spread | None) -> str:
    """`1.25`: the median of the ratios."""
    return ABSENT if spread is None else significant(spread.median)


def significant(value: float) -> str:
    """Three digits that count, more before the point where there are more."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def axis(value: Axis) -> str:
    """`1,000,000` for numbers."""
    return f"{value:,}" if isinstance(value, int) else value


def differing(rows: Iterable[Mapping[str, Axis]]) -> list[str]:
    """Returns the axes whose values differ between rows, in their order."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if len({row.get(name) for row in rows}) > 1]


def described(axes: Mapping[str, Axis], names: Iterable[str]) -> str:
    """`rows 1,000,000, output hot`: the values of some axes in words."""
    return ", ".join(f"{name} {axis(axes[name])}" for name in names if name in axes)
