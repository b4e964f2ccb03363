"""The targets: what each is, what was seen at worst, and whether it holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benches.cells import collection, frozen, lookup, many_rows, merge, one_id, optimizers, quantized, row_types, step
from benches.cells.one_table import OURS, YARDSTICK
from benches.cells.setting import BATCH, MILLION
from benches.competitors import fbgemm
from benches.derived import LARGE_BATCHES, SCALING, derive
from benches.measured import Axis, Figure, Outcome, Timed
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
    """

    text: str
    limit: float
    is_least: bool
    seen: Sequence[Seen]

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
    """A target for the time of `name` over that of `base`, in all cases of a cell that have these axes."""

    text: str
    limit: float
    cell: str
    name: str
    base: str
    axes: Mapping[str, Axis] = field(default_factory=dict)
    is_least: bool = False

    def of(self, timed: Sequence[Timed]) -> Target:
        cases = [case for case in timed if case.cell == self.cell and self.axes.items() <= case.axes.items()]
        return Target(self.text, self.limit, self.is_least, list(self._seen(cases)))

    def _seen(self, cases: Sequence[Timed]) -> Iterator[Seen]:
        named = differing(case.axes for case in cases)
        for case in cases:
            spread = case.ratio(self.name, self.base)
            if spread is not None:
                yield Seen(spread.median, described(case.axes, named))


def _in_table(rows: int) -> dict[str, Axis]:
    """The setting that targets are about: 65,536 uniform ids, rows of 64."""
    return {"rows": rows, "dim": 64, "ids a batch": BATCH, "ids": "uniform"}


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
        _Ratio(f"FBGEMM's full step over ours, {size}", 6, step.CELL, fbgemm.NAME, OURS, axes, is_least=True),
        _Ratio(f"nn.EmbeddingBag's over ours, {size}", 5, step.CELL, step.EMBEDDING_BAG, OURS, axes, is_least=True),
    ]


def _collections(dim: int, bag: int) -> list[_Ratio]:
    cell, size = collection.CELL, f"{collection.TABLES} tables of dim {dim}, {bag} ids a bag"
    axes: dict[str, Axis] = {"dim": dim, "ids a bag": bag}
    forward, whole = {**axes, "work": collection.FORWARD}, {**axes, "work": collection.STEP}
    return [
        _Ratio(f"FBGEMM's full step over ours, {size}", 4, cell, fbgemm.NAME, OURS, whole, is_least=True),
        _Ratio(f"FBGEMM's forward over ours, {size}", 1, cell, fbgemm.NAME, OURS, forward, is_least=True),
    ]


_MERGING: dict[str, Axis] = {"operator": merge.MERGE}

_RATIOS = (
    *_lookups(MILLION),
    *_lookups(8 * MILLION),
    *_steps(MILLION),
    *_steps(8 * MILLION),
    _Ratio(
        "SparseAdam's full step over our Adam's",
        10,
        optimizers.CELL,
        optimizers.SPARSE_ADAM,
        optimizers.ADAM,
        is_least=True,
    ),
    _Ratio("full step of FTRL over AdaGrad's", 1.2, optimizers.CELL, optimizers.FTRL, optimizers.ADAGRAD),
    _Ratio(
        "full step of row-wise AdaGrad over AdaGrad's", 1.2, optimizers.CELL, optimizers.ROWWISE, optimizers.ADAGRAD
    ),
    *(target for shape in collection.SHAPES for target in _collections(*shape)),
    _Ratio(
        "step over frozen tables over one without gradients of rows", 1.05, frozen.CELL, frozen.FROZEN, frozen.NO_GRAD
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
    _Ratio("torch's merging over `merge_gradients`", 5, merge.CELL, merge.TORCH, merge.OURS, _MERGING, is_least=True),
    _Ratio("full step of SGD in 50 million rows over the yardstick", 1.5, many_rows.CELL, OURS, YARDSTICK),
    *(
        _Ratio(f"{work} in bfloat16 over float32", 1, row_types.CELL, "bfloat16", row_types.FLOAT32, {"work": work})
        for work in ("lookup", "step")
    ),
)


def targets(outcomes: Sequence[Outcome]) -> list[Target]:
    """All targets, in the order of the report."""
    timed = [outcome for outcome in outcomes if isinstance(outcome, Timed) and not outcome.error]
    figures = [outcome for outcome in outcomes if isinstance(outcome, Figure) and outcome.limit]
    return [
        *(ratio.of(timed) for ratio in _RATIOS),
        _derived(timed, SCALING, 0.9, is_least=True),
        _derived(timed, LARGE_BATCHES, 1.3, is_least=False),
        *(_of_figure(figure) for figure in figures),
    ]


def _derived(timed: Sequence[Timed], name: str, limit: float, is_least: bool) -> Target:
    figures = [figure for figure in derive(timed) if figure.name == name and _is_in_table(figure.axes)]
    seen = [
        Seen(figure.value, f"{figure.cell}, {described(figure.axes, ('rows', 'output', 'threads'))}")
        for figure in figures
    ]
    return Target(name, limit, is_least, seen)


def _is_in_table(axes: Mapping[str, Axis]) -> bool:
    """Whether the axes are those of a table that targets are about, the size of the batch aside."""
    wanted = [_in_table(rows) for rows in (MILLION, 8 * MILLION)]
    return any(all(axes.get(name, value) == value for name, value in setting.items()) for setting in wanted)


_LIMIT = re.compile(r"\s*(<=|>=|at most|at least)\s*([0-9.]+)")


def _of_figure(figure: Figure) -> Target:
    """Reads a figure's own limit, such as `<= 1.2`.

    Raises:
        ValueError: a limit in other words.
    """
    found = _LIMIT.match(figure.limit)
    if found is None:
        raise ValueError(f'figure "{figure.name}" must have a limit such as "<= 1.2", got {figure.limit!r}')
    return Target(figure.name, float(found[2]), found[1] in (">=", "at least"), [Seen(figure.value, "")])
