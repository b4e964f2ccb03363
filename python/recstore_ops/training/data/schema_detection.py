"""Detects the roles of columns by fixed rules; the first rule that fits counts.

1. The caller's choice for a column.
2. The label: the one column, not of lists, named label, click, clk, clicked, is_click or is_clicked. If there is none,
   the one named target or y, and then rating, which is positive from 4 on. Files without a header: the first column,
   if it has no values but 0 and 1 or -1 and 1.
3. The index that pandas writes, cells that are all empty, dates and times, whole numbers by the name of a time, and
   several numbers in one cell of text are ignored.
4. Lists of integers or strings, and strings with `|` or `^` between others in more than one of a hundred cells, are
   ids. Lists of numbers of one length are vectors.
5. Floating-point numbers with fractions are numbers, and so are the counts I1 to I13 of Criteo. Everything else is
   categorical: integers, booleans, strings, and floating-point numbers without fractions, which integers with gaps
   become elsewhere.

Only the caller can choose the event time, the group, the weight and sequences. Numbers that are times are seconds,
milliseconds, microseconds or nanoseconds since 1970. The end of the column's name decides: _s, _ms, _us or _ns.
Without one of these the median decides: below 10^11, below 10^14, below 10^17, or above.

A number stays as it is if none of the sample is beyond 4. If not, it is standardized by the sample's mean and
deviation. If that leaves numbers beyond 8, its logarithm is taken instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from recstore_ops.training.data.arrow_functions import pc
from recstore_ops.training.data.sample import SEPARATORS, ColumnSample, is_date
from recstore_ops.training.data.schema import ColumnSchema, Role, Schema, Unit, listed

LABEL_NAMES = (("label", "click", "clk", "clicked", "is_click", "is_clicked"), ("target", "y"), ("rating",))
_DEFAULT_RATING = 4.0
_PANDAS_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0")
_TIMES = re.compile(r"(.*_)?(timestamp|ts|time|datetime|unixtime|date)(_(ms|s|us))?", re.IGNORECASE)
_UNIT = re.compile(r".*_(s|ms|us|ns)")
_MIN_OF_UNITS: tuple[tuple[Unit, float], ...] = (("ns", 1e17), ("us", 1e14), ("ms", 1e11), ("s", 0.0))
_CRITEO_COUNT = re.compile(r"I([1-9]|1[0-3])")
_LARGEST_AS_IT_IS = 4.0
_LARGEST_STANDARD = 8.0
_LABELS_IN_SAMPLE = 0.9
_WORDS = (("no", "yes"), ("n", "y"), ("false", "true"), ("f", "t"))


@dataclass(frozen=True)
class ColumnChoices:
    """The caller's choices about columns.

    Attributes:
        label: the column of the labels.
        dropped: columns that are ignored.
        roles: of further columns.
        threshold: the least value of the label that is positive.
        may_lack_label: rows without labels are read too.
        has_header: whether the names of the columns are the file's own.
        sequences: pairs of columns, a sequence and the one whose ids it has.
        group_by: the column by which rows are grouped, whatever else it is for.
    """

    label: str | None = None
    dropped: Sequence[str] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    threshold: float | None = None
    may_lack_label: bool = False
    has_header: bool = True
    sequences: Sequence[tuple[str, str]] = ()
    group_by: str | None = None


def detect_schema(samples: Sequence[ColumnSample], choices: ColumnChoices, source: str) -> Schema:
    """Returns the roles of the columns.

    Raises:
        ValueError: a column that the caller names is not there, no column is the label or several may be, or a column
            has cells that cannot be read.
    """
    names = [sample.name for sample in samples]
    for name in (*choices.dropped, *choices.roles):
        if name not in names:
            raise ValueError(f"{source}: expected a column {name!r}, got only {listed(names)}")
    label = _find_label(samples, choices, source)
    schema = Schema(tuple(_column(sample, label, choices, source) for sample in samples), source)
    schema.check()
    return schema


def _find_label(samples: Sequence[ColumnSample], choices: ColumnChoices, source: str) -> str | None:
    """Returns the name of the label's column; None if there is none and rows may lack a label."""
    several = [sample.name for sample in samples if sample.type.startswith("list")]
    names = [sample.name for sample in samples if sample.name not in choices.dropped]
    said = [name for name, role in choices.roles.items() if role == "label"]
    wanted = said if choices.label is None else [choices.label]
    groups = [tuple(wanted)] if wanted else LABEL_NAMES
    for group in groups:
        found = [name for name in names if name in group and choices.roles.get(name, "label") == "label"]
        found = [name for name in found if wanted or name not in several]
        if len(found) > 1:
            shown = " and ".join(map(repr, found))
            raise ValueError(
                f"{source}: columns {shown} could both be the labels: --column NAME=label names the one, --column "
                "NAME=ignored leaves out the other"
            )
        if found:
            return found[0]
    if not wanted and not choices.has_header and _looks_like_labels(samples[0]) and samples[0].name in names:
        return samples[0].name
    if choices.may_lack_label:
        return None
    asked = " or ".join(map(repr, wanted or LABEL_NAMES[0][:2]))
    raise ValueError(
        f"{source}: expected a column {asked} with the labels, got only {listed(names)}; --column NAME=label names it"
    )


def _looks_like_labels(sample: ColumnSample) -> bool:
    return sample.type in ("integer", "number", "boolean") and _negative_label(sample) is not None


def _negative_label(sample: ColumnSample) -> str | None:
    """Returns the negative label, "0" or "-1", if nearly all numbers are it or 1; a few rows may be bad."""
    numbers = sample.numbers
    # A column that has only 1 fits both; 0 comes first, so that it is the negative label then.
    for negative in (0.0, -1.0):
        if np.isin(numbers, (negative, 1.0)).sum() >= _LABELS_IN_SAMPLE * len(numbers):
            return f"{negative:g}"
    return None


def _column(sample: ColumnSample, label: str | None, choices: ColumnChoices, source: str) -> ColumnSchema:
    if sample.name == label:
        return _label_column(sample, choices.threshold, source)
    column = ColumnSchema(sample.name, "ignored", sample.type)
    if sample.name in choices.dropped:
        return replace(column, reason="as asked")
    if (role := choices.roles.get(sample.name)) is not None:
        return _completed(replace(column, role=role, reason="as asked"), sample, source)
    role, reason = _role_of(sample, source)
    return _completed(replace(column, role=role, reason=reason), sample, source)


def _role_of(sample: ColumnSample, source: str) -> tuple[Role, str]:
    """Returns the role of a column without a choice of the caller, and the reason."""
    if _PANDAS_INDEX.fullmatch(sample.name):
        return "ignored", "the index that pandas adds"
    if len(sample.cells) > 0 and sample.cells.null_count == len(sample.cells) and sample.type in ("null", "string"):
        return "ignored", "all cells are empty"
    if sample.said == "numbers":
        return "ignored", "several numbers in a cell"
    is_whole = sample.type == "integer" or (sample.type == "number" and sample.is_whole)
    # Before the last rule, which would make a categorical value, with a row of its own, of each moment.
    if sample.type == "time" or (is_whole and _TIMES.fullmatch(sample.name)):
        return "ignored", "a time"
    if _CRITEO_COUNT.fullmatch(sample.name) and sample.type in ("integer", "number"):
        return "number", "a count of Criteo"
    if sample.type in ("list of integer", "list of string"):
        return "ids", "lists"
    if sample.type == "list of number":
        return "vector", "lists of numbers"
    if sample.type == "number" and not is_whole:
        return "number", "numbers with fractions"
    if sample.separator is not None:
        return "ids", f"cells with {sample.separator!r}"
    if sample.type not in ("integer", "number", "boolean", "string"):
        raise ValueError(
            f"{source}: expected numbers, booleans, strings, times or lists of them in column {sample.name!r}, "
            f"got {sample.type}; drop_columns leaves a column out"
        )
    return "categorical", "numbers without fractions" if sample.type == "number" else ""


def _completed(column: ColumnSchema, sample: ColumnSample, source: str) -> ColumnSchema:
    """Returns a column with the properties of its cells that its role needs."""
    column.check_role(source)
    if column.role == "number":
        return _with_transform(column, sample)
    if column.role in ("ids", "sequence") and column.type == "string":
        return replace(column, separator=sample.separator or SEPARATORS[0])
    if column.role == "time":
        return _with_unit(column, sample, source)
    if column.role == "vector":
        return _with_size(column, sample, source)
    if column.role in ("categorical", "group") and column.type == "number":
        _check_whole(column, sample, source)
    return column


def _with_transform(column: ColumnSchema, sample: ColumnSample) -> ColumnSchema:
    numbers = sample.numbers
    if _CRITEO_COUNT.fullmatch(column.name):
        return replace(column, transform="log")
    if len(numbers) == 0 or np.abs(numbers).max() <= _LARGEST_AS_IT_IS:
        return replace(column, transform="none")
    # Squares of large numbers overflow in the deviation, and the check below takes that as a reason for the logarithm.
    with np.errstate(over="ignore"):
        mean, deviation = float(numbers.mean()), float(numbers.std())
    # Of equal numbers, or of those whose squares are beyond all numbers.
    if not np.isfinite(deviation) or deviation <= 1e-12 * abs(mean):
        return replace(column, transform="log")
    if np.abs((numbers - mean) / deviation).max() > _LARGEST_STANDARD:
        return replace(column, transform="log")
    return replace(column, transform="standard", mean=mean, deviation=deviation)


def _with_unit(column: ColumnSchema, sample: ColumnSample, source: str) -> ColumnSchema:
    if column.type == "time" and not is_date(sample.cells.type):
        raise ValueError(f"{source}: column {column.name!r} has {sample.cells.type}, and event times have a date")
    if column.type not in ("integer", "number"):
        return column
    if (said := _UNIT.fullmatch(column.name)) is not None:
        return replace(column, unit=cast(Unit, said.group(1)))
    median = float(np.median(np.abs(sample.numbers))) if len(sample.numbers) else 0.0
    return replace(column, unit=next(unit for unit, least in _MIN_OF_UNITS if median >= least))


def _with_size(column: ColumnSchema, sample: ColumnSample, source: str) -> ColumnSchema:
    size = sample.list_size
    if not size:
        raise ValueError(
            f"{source}: expected lists of one length in column {column.name!r}, vectors of numbers; got others; "
            "drop_columns leaves a column out"
        )
    return replace(column, size=size)


def _check_whole(column: ColumnSchema, sample: ColumnSample, source: str) -> None:
    if sample.merges_whole_numbers:
        raise ValueError(
            f"{source}: column {column.name!r} has whole numbers in {sample.cells.type}, which has not all numbers of "
            "that size, so that ids meet there: write it as integers"
        )


def _label_column(sample: ColumnSample, threshold: float | None, source: str) -> ColumnSchema:
    column = ColumnSchema(sample.name, "label", sample.type)
    column.check_role(source)
    if threshold is not None:
        _check_threshold(sample, threshold, source)
        return replace(column, threshold=threshold)
    if sample.type == "string":
        return _worded(column, sample, source)
    if (negative := _negative_label(sample)) is not None:
        return replace(column, negative=negative, positive="1")
    if sample.name == "rating":
        return replace(column, threshold=_DEFAULT_RATING, reason="ratings")
    shown = ", ".join(f"{each:g}" for each in sorted(set(sample.numbers.tolist()))[:3])
    raise ValueError(
        f"{source}: expected 0 and 1, or -1 and 1, in column {sample.name!r}, the labels, got {shown}; "
        "rating_threshold says from which value on a row is positive"
    )


def _check_threshold(sample: ColumnSample, threshold: float, source: str) -> None:
    """Refuses a threshold of labels that are no numbers, or that leaves no label of the sample on one of its sides."""
    if sample.type not in ("integer", "number"):
        raise ValueError(
            f"{source}: column {sample.name!r}, the labels, is {sample.type}: rating_threshold {threshold:g} is for "
            "numbers, leave it out"
        )
    numbers = sample.numbers
    if len(numbers) == 0 or numbers.min() < threshold <= numbers.max():
        return
    side = "positive" if threshold > numbers.max() else "negative"
    raise ValueError(
        f"{source}: rating_threshold {threshold:g} would leave no row {side}: the first {len(numbers):,} labels, in "
        f"column {sample.name!r}, are from {numbers.min():g} to {numbers.max():g}"
    )


def _worded(column: ColumnSchema, sample: ColumnSample, source: str) -> ColumnSchema:
    found = {str(each).lower() for each in pc.unique(sample.cells.drop_null()).to_pylist()}
    for negative, positive in _WORDS:
        if found and found <= {negative, positive}:
            return replace(column, negative=negative, positive=positive)
    shown = ", ".join(map(repr, sorted(found)[:3]))
    raise ValueError(
        f"{source}: expected numbers, booleans, or yes and no in column {column.name!r}, the labels, got {shown}"
    )
