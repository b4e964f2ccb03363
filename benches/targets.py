"""The targets: what each is, what was seen at worst, and whether it holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from benches.cells import (
    collection,
    frozen,
    lookup,
    ngram_memory,
    one_id,
    optimizers,
    quantized,
    row_types,
    rules,
    step,
)
from benches.cells.one_table import OURS, YARDSTICK
from benches.cells.setting import BATCH, LARGE_BATCH, MILLION
from benches.competitors import fbgemm
from benches.derived import LARGE_BATCHES, NEIGHBOURS, SCALING, derive
from benches.ids import DENSE, KINDS, SPREAD
from benches.measured import Axis, Figure, Outcome, Timed
from benches.spread import Spread
from benches.wording import described, differing


@dataclass(frozen=True)
class Seen:
    """A value, and the case that it was seen in."""

    value: float
    where: str


@dataclass(frozen=True)
class Target:
    """A limit and all values that it is about.

    Attributes:
        text: what is compared with what.
        limit: the greatest value, or with `is_least` the least one.
        unit: of limit and values; none for ratios.
    """

    text: str
    limit: float
    is_least: bool
    seen: Sequence[Seen]
    unit: str = ""

    @property
    def worst(self) -> Seen | None:
        """The value farthest on the wrong side; None where nothing was measured."""
        pick = min if self.is_least else max
        return pick(self.seen, key=lambda seen: seen.value, default=None)

    @property
    def holds(self) -> bool | None:
        """Whether all values keep to the limit; None where nothing was measured."""
        worst = self.worst
        if worst is None:
            return None
        return worst.value >= self.limit if self.is_least else worst.value <= self.limit


@dataclass(frozen=True)
class _Ratio:
    """A target for the time of each `name` over that of `base`, in all cases of a cell that have these axes."""

    text: str
    limit: float
    cell: str
    name: str | tuple[str, ...]
    base: str
    axes: Mapping[str, Axis] = field(default_factory=dict)
    is_least: bool = False

    def of(self, timed: Sequence[Timed]) -> Target:
        names = (self.name,) if isinstance(self.name, str) else self.name
        seen = [seen for name in names for seen in self._seen_of(name, timed, names)]
        return Target(self.text, self.limit, self.is_least, seen)

    def _seen_of(self, name: str, timed: Sequence[Timed], names: Sequence[str]) -> Iterator[Seen]:
        """The ratios of one competitor, with its name where there are others."""
        for seen in _seen(timed, self.cell, self.axes, lambda case: case.ratio(name, self.base)):
            where = ", ".join(part for part in (name, seen.where) if part)
            yield Seen(seen.value, where) if len(names) > 1 else seen


@dataclass(frozen=True)
class _Time:
    """A target for the microseconds that `name` takes, in all cases of a cell that have these axes."""

    text: str
    limit: float
    cell: str
    name: str
    axes: Mapping[str, Axis]

    def of(self, timed: Sequence[Timed]) -> Target:
        seen = _seen(timed, self.cell, self.axes, lambda case: case.spread(self.name))
        return Target(self.text, self.limit, False, [Seen(one.value / 1e3, one.where) for one in seen], "us")


def _seen(
    timed: Sequence[Timed], cell: str, axes: Mapping[str, Axis], figure: Callable[[Timed], Spread | None]
) -> Iterator[Seen]:
    cases = [case for case in timed if case.cell == cell and axes.items() <= case.axes.items()]
    named = differing(case.axes for case in cases)
    for case in cases:
        spread = figure(case)
        if spread is not None:
            yield Seen(spread.median, described(case.axes, named))


def _in_table(rows: int) -> dict[str, Axis]:
    """A setting that many targets are about: 65,536 uniform ids, rows of 64."""
    return {"rows": rows, "dim": 64, "ids a batch": BATCH, "drawn": "uniform"}


_COLD_ON_TWO_THREADS: dict[str, Axis] = {"output": "cold", "threads": 2}


def _short_rows() -> Iterator[_Ratio]:
    """Lookups and steps of rows of 8 with any ids, of rows of 16 by the kind of ids."""
    axes: dict[str, Axis] = {**_in_table(MILLION), "dim": 8}
    yield _Ratio("lookup over the yardstick, dim 8", 1.5, lookup.CELL, OURS, YARDSTICK, axes)
    text = "full step over the yardstick, dim 8, 1 thread"
    yield _Ratio(text, 1.6, step.CELL, OURS, YARDSTICK, {**axes, "threads": 1})
    for kind, of_lookup, of_step in ((DENSE, 1.3, 1.6), (SPREAD, 1.8, 2.2)):
        axes = {**_in_table(MILLION), "dim": 16, "ids": kind}
        yield _Ratio(f"lookup over the yardstick, dim 16, {kind}", of_lookup, lookup.CELL, OURS, YARDSTICK, axes)
        yield _Ratio(f"full step over the yardstick, dim 16, {kind}", of_step, step.CELL, OURS, YARDSTICK, axes)


def _beside_peers() -> Iterator[_Ratio]:
    """Lookups on one thread beside the faster one of the peers."""
    cases = [(dim, BATCH, kind, limit) for dim in (8, 16, 64) for kind, limit in ((DENSE, 1.4), (SPREAD, 1.0))]
    for dim, batch, kind, limit in (*cases, (64, LARGE_BATCH, DENSE, 1.2)):
        axes: dict[str, Axis] = {**_in_table(MILLION), "dim": dim, "ids a batch": batch, "ids": kind, "threads": 1}
        text = f"the faster peer's lookup over ours, {batch:,} ids, dim {dim}, {kind}, 1 thread"
        yield _Ratio(text, limit, lookup.CELL, (fbgemm.NAME, lookup.EMBEDDING), OURS, axes, is_least=True)


def _skewed() -> Iterator[_Ratio]:
    for rows, limit in ((MILLION, 1.3), (8 * MILLION, 1.2)):
        axes: dict[str, Axis] = {**_in_table(rows), "drawn": "zipf", **_COLD_ON_TWO_THREADS}
        text = f"over the yardstick, Zipf, {rows:,} rows"
        yield _Ratio(f"lookup {text}", limit, lookup.CELL, OURS, YARDSTICK, axes)
        yield _Ratio(f"full step {text}", 1.4, step.CELL, OURS, YARDSTICK, axes)


def _small_batches() -> Iterator[_Ratio | _Time]:
    for batch, limit in ((4_096, 2.0), (256, 2.8)):
        axes: dict[str, Axis] = {**_in_table(MILLION), "ids a batch": batch, **_COLD_ON_TWO_THREADS}
        yield _Ratio(f"lookup over the yardstick, {batch:,} ids", 1.25, lookup.CELL, OURS, YARDSTICK, axes)
        yield _Ratio(f"full step over the yardstick, {batch:,} ids", limit, step.CELL, OURS, YARDSTICK, axes)
    axes = {**_in_table(MILLION), "ids a batch": 1}
    yield _Time("full step of one id", 45, step.CELL, OURS, axes)
    text = "nn.EmbeddingBag's full step of one id over ours"
    yield _Ratio(text, 5.5, step.CELL, step.EMBEDDING_BAG, OURS, axes, is_least=True)


def _lookups(rows: int) -> list[_Ratio]:
    axes, size = _in_table(rows), f"{rows:,} rows"
    return [
        _Ratio(f"lookup over the yardstick, {size}", 1.3, lookup.CELL, OURS, YARDSTICK, axes),
        _Ratio(f"FBGEMM's lookup over ours, {size}", 1, lookup.CELL, fbgemm.NAME, OURS, axes, is_least=True),
        _Ratio(f"ids without a row over the yardstick, {size}", 3, lookup.CELL, lookup.MISSING, YARDSTICK, axes),
    ]


def _steps(rows: int) -> list[_Ratio]:
    axes, size = _in_table(rows), f"{rows:,} rows"
    return [
        _Ratio(f"full step over the yardstick, {size}", 1.5, step.CELL, OURS, YARDSTICK, axes),
        _Ratio(
            f"FBGEMM's full step over ours, {size}, 2 threads",
            6,
            step.CELL,
            fbgemm.NAME,
            OURS,
            {**axes, "threads": 2},
            is_least=True,
        ),
        _Ratio(
            f"nn.EmbeddingBag's full step over ours, {size}",
            5,
            step.CELL,
            step.EMBEDDING_BAG,
            OURS,
            axes,
            is_least=True,
        ),
    ]


def _collections(dim: int, bag: collection.Bag) -> list[_Ratio]:
    cell, size = collection.CELL, f"{collection.TABLES} tables of dim {dim}, {bag} ids a bag"
    axes: dict[str, Axis] = {"dim": dim, "ids a bag": bag, "threads": 2}
    forward, whole = {**axes, "work": collection.FORWARD}, {**axes, "work": collection.STEP}
    over_yardstick = [
        _Ratio(f"forward over the yardstick, {size}", 1.6, cell, OURS, YARDSTICK, forward),
        _Ratio(f"full step over the yardstick, {size}", 1.8, cell, OURS, YARDSTICK, whole),
    ]
    over_ours = [
        _Ratio(f"FBGEMM's full step over ours, {size}", 4, cell, fbgemm.NAME, OURS, whole, is_least=True),
        _Ratio(f"FBGEMM's forward over ours, {size}", 1, cell, fbgemm.NAME, OURS, forward, is_least=True),
    ]
    others = [target for target in over_ours if (dim, bag, target.axes["work"]) not in _BY_KIND]
    return [*(over_yardstick if (dim, bag) == (16, 1) else ()), *others]


_BY_KIND = {
    (16, 1, collection.FORWARD): (1.2, 1.6),
    (16, 20, collection.FORWARD): (1.2, 1.6),
    (16, 20, collection.STEP): (3.5, 5.0),
    (128, collection.MLPERF, collection.FORWARD): (1.0, 1.0),
    (128, collection.MLPERF, collection.STEP): (3.0, 3.0),
}
"""How many times our time FBGEMM should take with dense and with spread ids: on one thread, and on two."""


def _collections_by_kind() -> Iterator[_Ratio]:
    for (dim, bag, work), limits in _BY_KIND.items():
        for kind, (threads, limit) in product(KINDS, enumerate(limits, 1)):
            axes: dict[str, Axis] = {"work": work, "dim": dim, "ids a bag": bag, "threads": threads, "ids": kind}
            name = "full step" if work == collection.STEP else work
            size = f"{collection.TABLES} tables of dim {dim}, {bag} ids a bag"
            text = f"FBGEMM's {name} over ours, {size}, {kind}, {_on_threads(threads)}"
            yield _Ratio(text, limit, collection.CELL, fbgemm.NAME, OURS, axes, is_least=True)


def _on_threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


_OF_CASES: tuple[_Ratio | _Time, ...] = (
    *_lookups(MILLION),
    *_lookups(8 * MILLION),
    *_steps(MILLION),
    *_steps(8 * MILLION),
    *_short_rows(),
    *_beside_peers(),
    *_skewed(),
    *_small_batches(),
    _Ratio("full step of FTRL over AdaGrad's", 1.2, optimizers.CELL, optimizers.FTRL, optimizers.ADAGRAD),
    _Ratio(
        "full step of row-wise AdaGrad over AdaGrad's", 1.2, optimizers.CELL, optimizers.ROWWISE, optimizers.ADAGRAD
    ),
    *(
        _Ratio(
            f"full step of {rule.name} over AdaGrad's, rows of {setting.dim}",
            1.25 * rule.bytes_over_adagrad(setting.dim),
            rules.CELL,
            rules.RULE,
            rules.ADAGRAD,
            {"rule": rule.name, "dim": setting.dim},
        )
        for rule in rules.RULES
        for setting in rules.SETTINGS
    ),
    *(target for shape in collection.SHAPES for target in _collections(*shape)),
    *_collections_by_kind(),
    _Ratio(
        "step over frozen tables over one without gradients of rows", 1.05, frozen.CELL, frozen.FROZEN, frozen.NO_GRAD
    ),
    _Ratio(
        "step of a small GPT with a memory of 10 million rows over one without",
        1.05,
        ngram_memory.CELL,
        ngram_memory.WITH_MEMORY,
        ngram_memory.GPT,
        {"GPT": ngram_memory.SIZES[-1].name},
    ),
    _Ratio(
        "bags of a live table over those of int8, copied",
        1.5,
        quantized.CELL,
        quantized.LIVE,
        quantized.frozen_name("int8", "copied"),
        is_least=True,
    ),
    *(
        _Ratio(
            f"FBGEMM's bags of {encoding} over ours, copied",
            1,
            quantized.CELL,
            quantized.fbgemm_name(encoding),
            quantized.frozen_name(encoding, "copied"),
            is_least=True,
        )
        for encoding in quantized.QUANTIZED
    ),
    _Ratio("`emb_read` of one id over `F.embedding`", 1.1, one_id.CELL, one_id.OURS, one_id.EMBEDDING),
    *(
        _Ratio(f"step in {name} over bfloat16", 1.15, row_types.CELL, name, row_types.BFLOAT16, {"work": "step"})
        for name in row_types.CODED
    ),
    *(
        _Ratio(f"{work} in {name} over float32", limit, row_types.CELL, name, row_types.FLOAT32, {"work": work})
        for work, name, limit in (
            ("lookup", row_types.BFLOAT16, 1),
            ("step", row_types.BFLOAT16, 1.05),
            ("step", row_types.FLOAT16, 1.15),
        )
    ),
)


def targets(outcomes: Sequence[Outcome]) -> list[Target]:
    """All targets, in the order of the report."""
    timed = [outcome for outcome in outcomes if isinstance(outcome, Timed) and not outcome.error]
    figures = [outcome for outcome in outcomes if isinstance(outcome, Figure) and outcome.limit]
    return [
        *(target.of(timed) for target in _OF_CASES),
        _derived(timed, SCALING, 0.92, is_least=True),
        _derived(timed, LARGE_BATCHES, 1.3, is_least=False),
        _derived(timed, NEIGHBOURS, 1.15, is_least=False),
        *(_of_figure(figure) for figure in figures),
    ]


def _derived(timed: Sequence[Timed], name: str, limit: float, is_least: bool) -> Target:
    figures = [figure for figure in derive(timed) if figure.name == name]
    seen = [Seen(figure.value, f"{figure.cell}, {described(figure.axes, figure.axes)}") for figure in figures]
    return Target(name, limit, is_least, seen)


_LIMIT = re.compile(r"\s*(<=|>=|at most|at least)\s*([0-9.]+)")


def _of_figure(figure: Figure) -> Target:
    """Reads a figure's own limit, such as `<= 1.2`.

    Raises:
        ValueError: a limit in other words.
    """
    found = _LIMIT.match(figure.limit)
    if found is None:
        raise ValueError(f'figure "{figure.name}" must have a limit such as "<= 1.2", got {figure.limit!r}')
    unit = "" if figure.unit == "x" else figure.unit
    return Target(figure.name, float(found[2]), found[1] in (">=", "at least"), [Seen(figure.value, "")], unit)
