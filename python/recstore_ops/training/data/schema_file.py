"""Schemas as TOML files, for people to read and change."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.table import Table
from rich.text import Text

from recstore_ops.config.directory import replace_file
from recstore_ops.training.data.sample import ColumnSample
from recstore_ops.training.data.schema import ColumnSchema, Role, Schema, Transform, Unit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = "schema.toml"
"""The name of the file in the directory of a run."""

_VERSION = 1
_HEADING = """\
# What `recstore train` understood of the columns. With --schema it reads files as such a file says: change roles
# and types that are not what you mean.
"""
_TEXTS = ("name", "role", "type", "transform", "separator", "of", "negative", "positive", "unit", "reason")
_NUMBERS = ("mean", "deviation", "threshold")
_CHOICES = {"role": get_args(Role), "transform": get_args(Transform), "unit": get_args(Unit)}


def write_schema(path: Path, schema: Schema) -> None:
    """Writes a schema to a file, in one move.

    Raises:
        ValueError: a number in it is not finite.
    """
    lines = [_HEADING, f"version = {_VERSION}", ""]
    for column in schema.columns:
        lines += ["[[column]]", *_lines(column), ""]
    replace_file(path, "\n".join(lines).encode())


def read_schema(path: Path) -> Schema:
    """Returns the schema of a file.

    Raises:
        ValueError: the file is no schema; the message names the column and the key.
        OSError: it cannot be read.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no TOML: {error}") from None
    _check_keys(content, ("version", "column"), f"{path}")
    if content.get("version") != _VERSION:
        raise ValueError(f"{path}: expected version = {_VERSION}, got {content.get('version')!r}")
    columns = content.get("column")
    if not isinstance(columns, list) or not columns:
        raise ValueError(f"{path}: expected [[column]] for each column, got none")
    schema = Schema(tuple(_column(values, f"{path}: column {n + 1}") for n, values in enumerate(columns)), str(path))
    schema.check()
    return schema


def _lines(column: ColumnSchema) -> list[str]:
    values = {each.name: getattr(column, each.name) for each in fields(column)}
    for name in _NUMBERS:
        if values[name] is not None and not math.isfinite(values[name]):
            raise ValueError(f"column {column.name!r} must have a finite {name}, got {values[name]}")
    return [f"{name} = {_literal(value)}" for name, value in values.items() if value is not None and value != ""]


def _literal(value: str | float) -> str:
    # What JSON writes is TOML too, but for characters beyond 16 bits, which it would escape, and one that it does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _column(values: dict[str, Any], where: str) -> ColumnSchema:
    names = tuple(each.name for each in fields(ColumnSchema))
    _check_keys(values, names, where)
    if missing := [name for name in ("name", "role", "type") if name not in values]:
        raise ValueError(f"{where}: expected a {missing[0]}, got none")
    where = f"{where}, {values['name']!r}"
    for name, value in values.items():
        _check_value(name, value, where)
    typed: dict[str, Any] = {name: float(value) if name in _NUMBERS else value for name, value in values.items()}
    column = ColumnSchema(**typed)
    _check_needs(column, where)
    return column


def _check_value(name: str, value: Any, where: str) -> None:
    if name in _TEXTS and not isinstance(value, str):
        raise ValueError(f"{where}: expected a string as {name}, got {value!r}")
    if name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{where}: expected a number as {name}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number as {name}, got {value!r}")
    if name == "size" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{where}: expected a size of 1 or more, got {value!r}")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"{where}: expected {' or '.join(_CHOICES[name])} as {name}, got {value!r}")


def _check_needs(column: ColumnSchema, where: str) -> None:
    """Refuses a column that lacks a key its role needs, or has one that it does not take."""
    needs = _needs(column)
    for name in ("transform", "mean", "deviation", "separator", "size", "negative", "positive", "threshold", "unit"):
        is_given = getattr(column, name) is not None
        if is_given != (name in needs):
            found = "takes no" if is_given else "needs a"
            raise ValueError(f"{where}: a column of the role {column.role} {found} {name} here")
    if column.of is not None and column.role != "sequence":
        raise ValueError(f"{where}: a column of the role {column.role} takes no of here")
    if column.deviation is not None and column.deviation <= 0:
        raise ValueError(f"{where}: expected a deviation above 0, got {column.deviation}")


def _needs(column: ColumnSchema) -> tuple[str, ...]:
    if column.role == "number":
        return ("transform", "mean", "deviation") if column.transform == "standard" else ("transform",)
    if column.role == "label":
        is_number = column.type in ("integer", "number")
        return ("threshold",) if is_number and column.threshold is not None else ("negative", "positive")
    if column.role in ("ids", "sequence") and column.type == "string":
        return ("separator",)
    if column.role == "time":
        return ("unit",) if column.type in ("integer", "number") else ()
    return ("size",) if column.role == "vector" else ()


def _check_keys(values: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f'did you mean "{near[0]}"?' if near else f"the known ones are {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {name!r}; {meant}")


_MAX_COLUMNS = 60
_ROWS_THAT_TELL = 1000


def schema_table(schema: Schema, samples: Sequence[ColumnSample], title: str) -> Table:
    """Returns a line a column: role, type, its rule, an example, and figures of the sample.

    Args:
        schema: of the columns.
        samples: the sampled columns.
        title: the source of the columns.
    """
    # Whatever stands in files is no markup.
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in ("column", "role", "type", "rule", "example"):
        table.add_column(name, overflow="fold")
    for name in ("missing", "distinct"):
        table.add_column(name, justify="right")
    by_name = {sample.name: sample for sample in samples}
    for column in schema.columns[:_MAX_COLUMNS]:
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
    if (more := len(schema.columns) - _MAX_COLUMNS) > 0:
        notes.append(f"the table shows {_MAX_COLUMNS} columns, and there are {more} more: schema.toml has all")
    unlike = {sample.name for sample in samples if len(sample.cells) >= _ROWS_THAT_TELL and _differs_in_each(sample)}
    if every := [column.name for column in schema.of_role("categorical") if column.name in unlike]:
        notes.append(f"{', '.join(every)}: another value in each row; --column {every[0]}=ignored leaves it out")
    return tuple(notes)


def _differs_in_each(sample: ColumnSample) -> bool:
    return sample.distinct == len(sample.cells)
