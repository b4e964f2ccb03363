"""Figures that follow from several cases: how a second thread scales, whether large batches cost more an id, and
whether sizes between others are slower than those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benches.cells import collection, lookup, neighbours, step
from benches.cells.one_table import OURS, YARDSTICK
from benches.cells.setting import BATCH, LARGE_BATCH
from benches.measured import Axis, Timed

SCALING = "gain of a second thread over the yardstick's own gain"
LARGE_BATCHES = "time an id at 1,048,576 ids a batch over that at 65,536"
NEIGHBOURS = "multiple of the yardstick over the greater one of its neighbours"


@dataclass(frozen=True)
class Derived:
    """A figure made of two cases that differ in one axis; `axes` are those that they share."""

    name: str
    cell: str
    axes: Mapping[str, Axis]
    value: float


def derive(timed: Sequence[Timed]) -> list[Derived]:
    """All such figures."""
    makes = {cell: (_scaling, _large_batches) for cell in (lookup.CELL, step.CELL)}
    makes |= {collection.CELL: (_scaling,), neighbours.CELL: (_between_neighbours,)}
    cases = {cell: [case for case in timed if case.cell == cell and not case.error] for cell in makes}
    return [figure for cell in makes for make in makes[cell] for figure in make(cases[cell])]


def _scaling(cases: Iterable[Timed]) -> Iterator[Derived]:
    """Both gains were measured in the same rounds as the yardstick, so its time cancels out."""
    for alone, together in _pairs(cases, "threads", 1, 2):
        yield from _quotient(SCALING, alone, together, _over_yardstick)


def _large_batches(cases: Iterable[Timed]) -> Iterator[Derived]:
    for small, large in _pairs(cases, "ids a batch", BATCH, LARGE_BATCH):
        yield from _quotient(LARGE_BATCHES, large, small, _time_an_id)


def _between_neighbours(cases: Iterable[Timed]) -> Iterator[Derived]:
    """Neighbours are the nearest values on both sides, in one axis, that the cells `lookup` and `step` measure."""
    by_axes = {_key(case.axes): case for case in cases}
    for case in by_axes.values():
        sides = [by_axes[key] for axes in _neighbours(case.axes) if (key := _key(axes)) in by_axes]
        ratios = [ratio for side in sides if (ratio := _over_yardstick(side)) is not None]
        own = _over_yardstick(case)
        if own is not None and ratios:
            yield Derived(NEIGHBOURS, case.cell, case.axes, own / max(ratios))


def _neighbours(axes: Mapping[str, Axis]) -> Iterator[dict[str, Axis]]:
    for name, values in neighbours.AXES.items():
        ordered = list(values)
        place = ordered.index(axes[name])
        if not values[axes[name]]:
            for side in (reversed(ordered[:place]), ordered[place:]):
                nearest = next((value for value in side if values[value]), None)
                if nearest is not None:
                    yield {**axes, name: nearest}


def _pairs(cases: Iterable[Timed], name: str, first: Axis, second: Axis) -> Iterator[tuple[Timed, Timed]]:
    """Gives the pairs of cases that agree in all axes but one, where they have these values."""
    by_axes = {_key(case.axes): case for case in cases}
    for case in by_axes.values():
        other = by_axes.get(_key({**case.axes, name: second}))
        if case.axes.get(name) == first and other is not None:
            yield case, other


def _key(axes: Mapping[str, Axis]) -> tuple[tuple[str, Axis], ...]:
    return tuple(sorted(axes.items()))


def _quotient(name: str, dividend: Timed, divisor: Timed, figure: Callable[[Timed], float | None]) -> Iterator[Derived]:
    above, below = figure(dividend), figure(divisor)
    if above is not None and below is not None:
        shared = {axis: value for axis, value in dividend.axes.items() if value == divisor.axes[axis]}
        yield Derived(name, dividend.cell, shared, above / below)


def _over_yardstick(case: Timed) -> float | None:
    spread = case.ratio(OURS, YARDSTICK)
    return None if spread is None else spread.median


def _time_an_id(case: Timed) -> float | None:
    spread = case.spread(OURS)
    return None if spread is None else spread.median / int(case.axes["ids a batch"])
