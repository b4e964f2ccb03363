"""The table that shows what was understood of the columns, before training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from recstore_ops.training.schema.columns import ColumnSchema, Schema
from recstore_ops.training.schema.sample import ColumnSample

_MOST_COLUMNS = 60
_ROWS_THAT_TELL = 1000


def schema_table(schema: Schema, samples: Sequence[ColumnSample], title: str) -> Table:
    """Returns a line a column: role, type, what becomes of it, an example, and figures of the sample.

    Args:
        schema: of the columns.
        samples: the columns that were looked at.
        title: where they come from.
    """
    # Whatever stands in files is no markup.
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in ("column", "role", "type", "rule", "example"):
        table.add_column(name, overflow="fold")
    for name in ("missing", "distinct"):
        table.add_column(name, justify="right")
    by_name = {sample.name: sample for sample in samples}
    for column in schema.columns[:_MOST_COLUMNS]:
        table.add_row(*map(Text, _cells(column, by_name[column.name])))
    return table


def positive_share(schema: Schema, samples: Sequence[ColumnSample]) -> float | None:
    """Returns which part of the sample's labels is positive; None without labels."""
    label = schema.label
    sample = next((each for each in samples if label is not None and each.name == label.name), None)
    if label is None or sample is None or len(sample.cells) == 0:
        return None
    if label.type == "string":
        words = [str(each).lower() == label.positive for each in sample.cells.to_pylist()]
        return float(np.mean(words))
    positive = sample.numbers >= label.threshold if label.threshold is not None else sample.numbers == 1
    return float(np.mean(positive)) if len(positive) else None


def _cells(column: ColumnSchema, sample: ColumnSample) -> tuple[str, ...]:
    rows = len(sample.cells)
    missing = "" if rows == 0 else f"{sample.missing / rows:.1%}"
    distinct = "" if column.role in ("number", "vector") else f"{sample.distinct:,}"
    rule = column.rule or (column.reason if column.role == "ignored" else "")
    return column.name, column.role, column.type, rule, sample.example, missing, distinct


def schema_notes(schema: Schema, samples: Sequence[ColumnSample]) -> tuple[str, ...]:
    """Returns what the table does not show, in sentences."""
    notes = []
    if (more := len(schema.columns) - _MOST_COLUMNS) > 0:
        notes.append(f"the table shows {_MOST_COLUMNS} columns, and there are {more} more: schema.toml has all")
    unlike = {sample.name for sample in samples if len(sample.cells) >= _ROWS_THAT_TELL and _differs_in_each(sample)}
    if every := [column.name for column in schema.of_role("categorical") if column.name in unlike]:
        notes.append(f"{', '.join(every)}: another value in each row; --column {every[0]}=ignored leaves it out")
    return tuple(notes)


def _differs_in_each(sample: ColumnSample) -> bool:
    return sample.distinct == len(sample.cells)
