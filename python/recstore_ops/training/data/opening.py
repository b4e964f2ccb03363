"""Opens files of rows in any format."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from recstore_ops.training.data.arrow_rows import ArrowRows
from recstore_ops.training.data.batch import field_number
from recstore_ops.training.data.delimited import DEFAULT_THRESHOLD, avazu_format, criteo_format, movielens_format
from recstore_ops.training.data.field_ids import VALUE_BITS
from recstore_ops.training.data.format_detection import (
    AVAZU_COMMAS,
    CRITEO_TABS,
    FormatName,
    detect_format,
    has_labels,
    movielens_kind,
)
from recstore_ops.training.data.named_columns import open_csv, open_parquet
from recstore_ops.training.data.row_format import RowFormat
from recstore_ops.training.data.row_source import HashedRows, MappedRows, RowSource
from recstore_ops.training.data.schema import Role, Schema, check_column_choices, listed, read_role
from recstore_ops.training.data.schema_detection import ColumnChoices
from recstore_ops.training.data.sparse_lines import QUERY, LibffmFormat, LibsvmFormat, query_of
from recstore_ops.training.data.text_rows import OnBadLine, TextRows, first_lines

LINES_LOOKED_AT = 4096
# Whoever numbers fields like ids, far apart, would get rows of mostly empty fields.
MAX_FIELDS = 4096
_FIELDS = re.compile(rb"[ \t]([0-9]{1,9}):[^ \t:]*:")


def count_libsvm_fields(path: Path) -> int:
    """Returns the number of features of the first good row.

    Raises:
        ValueError: there is no such row with features near the beginning.
    """
    row_format = LibsvmFormat()
    for line in first_lines(path, LINES_LOOKED_AT):
        try:
            num_fields = row_format.parse(line).ids.numel()
        except ValueError:
            continue
        if num_fields > 0:
            return num_fields
    raise ValueError(f"expected id:value (libsvm) in the first {LINES_LOOKED_AT} lines of {path}; give num_fields")


def has_queries(path: Path) -> bool:
    """Whether the first lines of libsvm say which query a row belongs to."""
    return any(map(query_of, first_lines(path, LINES_LOOKED_AT)))


def count_libffm_fields(path: Path) -> int:
    """Returns one more than the largest field in the first lines.

    Raises:
        ValueError: there is no field near the beginning, or they are numbered too far apart to be fields of a row.
    """
    fields = [int(field) for line in first_lines(path, LINES_LOOKED_AT) for field in _FIELDS.findall(line)]
    if not fields:
        raise ValueError(f"expected field:id:value (libffm) in the first {LINES_LOOKED_AT} lines of {path}")
    if max(fields) >= MAX_FIELDS:
        raise ValueError(f"expected fields below {MAX_FIELDS}, got {max(fields)} in {path}; give num_fields")
    return max(fields) + 1


class SequenceRows(MappedRows):
    """The rows of a source, with the target's field in place of the history's in each id of a history.

    The ids of the source carry their field (`field_ids`). Then an item has one row of a table, as target and in every
    history.

    Args:
        source: before its ids are hashed.
        sequences: pairs of names of fields, a history and its target.

    Raises:
        ValueError: there is no such field.
    """

    def __init__(self, source: RowSource, sequences: Sequence[tuple[str, str]]) -> None:
        names = source.field_names
        self._sequences = [tuple(field_number("sequences", name, names) for name in pair) for pair in sequences]
        super().__init__(source, self._in_space_of_targets)

    def _in_space_of_targets(self, ids_N: Tensor) -> Tensor:
        # Fields and shifts come from the ids as they were: an id that moved into the field of another history would
        # move again.
        fields_N = ids_N >> VALUE_BITS
        shifts_N = torch.zeros_like(ids_N)
        for history, target in self._sequences:
            shifts_N[fields_N == history] = (target - history) << VALUE_BITS
        return ids_N + shifts_N


# The formats whose rows have fields only where asked for: what makes them, what counts the fields, and where it looks.
_SPARSE: dict[FormatName, tuple[Callable[..., RowFormat], Callable[[Path], int], str]] = {
    "libsvm": (LibsvmFormat, count_libsvm_fields, "first row"),
    "libffm": (LibffmFormat, count_libffm_fields, "first lines"),
}


_NAMED = ("csv", "parquet")


@dataclass(frozen=True)
class _Options:
    by_field: bool
    num_fields: int | None
    on_bad_line: OnBadLine
    ignore_values: bool
    rating_threshold: float | None
    label_column: str | None
    drop_columns: tuple[str, ...]
    column_roles: Mapping[str, str]
    schema: Schema | None
    labels: Literal["required", "optional"]
    sequences: tuple[tuple[str, str], ...]
    group_by: str | None


def open_rows(
    paths: Sequence[Path],
    *,
    file_format: FormatName | None = None,
    by_field: bool = False,
    num_fields: int | None = None,
    on_bad_line: OnBadLine = "stop",
    ignore_values: bool = False,
    hash_buckets: int | None = None,
    rating_threshold: float | None = None,
    label_column: str | None = None,
    drop_columns: Sequence[str] = (),
    column_roles: Mapping[str, str] | None = None,
    schema: Schema | None = None,
    labels: Literal["required", "optional"] = "required",
    sequences: Sequence[tuple[str, str]] = (),
    group_by: str | None = None,
    like: RowSource | None = None,
) -> RowSource:
    """Returns the rows of files of one format; the beginnings of the files are read now, the rest when asked for.

    Args:
        paths: one file or more.
        file_format: None detects it.
        by_field: whether rows need fields. If so, libsvm takes the n-th feature of a row as its n-th field, and libffm
            groups features by their fields. The other formats always have fields.
        num_fields: of libsvm or libffm by field; None takes the features of the first row (libsvm), or the fields up
            to the largest one near the beginning (libffm).
        on_bad_line: "stop" raises at the first bad line or row; "skip" counts it and goes on.
        ignore_values: take every value of libsvm or libffm as 1.
        hash_buckets: hash ids into [0, hash_buckets); None leaves them.
        rating_threshold: the least rating that is a 1, of MovieLens, CSV or Parquet; None takes 4 for MovieLens.
        label_column: the label's column in CSV or Parquet; None finds it by its name.
        drop_columns: columns of CSV or Parquet that are not read.
        column_roles: roles of further columns of CSV or Parquet, by name; `sequence:item` is a sequence of the ids
            of the column `item`.
        schema: the roles of all columns of CSV or Parquet; None detects them.
        labels: "optional" opens rows without labels too, which get NaN.
        sequences: pairs of names of fields, a history and its target: the history's ids get the target's id space, and
            columns of CSV or Parquet the role of a sequence. In libsvm and libffm all fields have one id space anyway.
        group_by: the column of CSV or Parquet by whose values rows are grouped, whatever its role. None takes the
            column of the role group, or `qid` of libsvm, if there is one. Rows of other formats have no groups, nor do
            rows of libsvm if this names a field: `predict` takes segments by field.
        like: the training rows of test rows, whose fields and dense features these must have; CSV and Parquet by
            name, in any order.

    Raises:
        ValueError: no format fits, files have different formats, or an option has no meaning for their format.
        OSError: a file cannot be read.
    """
    if not paths:
        raise ValueError("expected at least one file, got none")
    name = _format_of(paths, file_format)
    options = _Options(
        by_field,
        num_fields,
        on_bad_line,
        ignore_values,
        rating_threshold,
        label_column,
        tuple(drop_columns),
        column_roles or {},
        schema,
        labels,
        tuple(sequences),
        group_by,
    )
    _check_options(name, options)
    rows = _open(paths, name, options, like)
    _check_alike(paths[0], rows, like)
    if labels == "required" and not rows.has_labels:
        raise ValueError(f"{paths[0]} has no labels")
    if sequences and name not in (*_SPARSE, *_NAMED):
        rows = SequenceRows(rows, sequences)
    return rows if hash_buckets is None else HashedRows(rows, hash_buckets)


def _format_of(paths: Sequence[Path], file_format: FormatName | None) -> FormatName:
    if file_format is not None:
        if file_format not in get_args(FormatName):
            raise ValueError(f"expected one of {', '.join(get_args(FormatName))} as format, got {file_format!r}")
        return file_format
    first = detect_format(paths[0])
    for path in paths[1:]:
        if (other := detect_format(path)) != first:
            raise ValueError(f"expected files of one format, got {paths[0]} ({first}) and {path} ({other})")
    return first


def _check_options(name: FormatName, options: _Options) -> None:
    sparse, by_field = name in _SPARSE, options.by_field and name in _SPARSE
    named = name in _NAMED
    given = (
        ("num_fields", options.num_fields is not None, by_field, "libsvm and libffm by field"),
        ("ignore_values", options.ignore_values, sparse, "libsvm and libffm"),
        (
            "rating_threshold",
            options.rating_threshold is not None,
            named or name == "movielens",
            "movielens, csv and parquet",
        ),
        ("label_column", options.label_column is not None, named, "csv and parquet"),
        ("drop_columns", bool(options.drop_columns), named, "csv and parquet"),
        ("column_roles", bool(options.column_roles), named, "csv and parquet"),
        ("schema", options.schema is not None, named, "csv and parquet"),
    )
    for option, is_given, has_meaning, meant_for in given:
        if is_given and not has_meaning:
            raise ValueError(f"{option} is for {meant_for}, but the files are {name}")
    for column, role in options.column_roles.items():
        try:
            read_role(role)
        except ValueError:
            known = ", ".join(get_args(Role))
            raise ValueError(f"expected one of {known} as role of {column!r}, got {role!r}") from None
    check_column_choices(options.label_column, options.drop_columns, options.column_roles)
    if options.schema is not None:
        _check_schema_alone(options)
    if options.rating_threshold is not None and not math.isfinite(options.rating_threshold):
        raise ValueError(f"rating_threshold must be a finite number, got {options.rating_threshold}")
    if options.num_fields is not None and options.num_fields < 1:
        raise ValueError(f"expected num_fields to be at least 1, got {options.num_fields}")
    if options.on_bad_line not in get_args(OnBadLine):
        raise ValueError(f"expected on_bad_line to be stop or skip, got {options.on_bad_line!r}")


def _check_schema_alone(options: _Options) -> None:
    """Refuses what a schema says already."""
    said = {
        "rating_threshold": options.rating_threshold is not None,
        "label_column": options.label_column is not None,
        "drop_columns": bool(options.drop_columns),
        "column_roles": bool(options.column_roles),
    }
    if given := [name for name, is_given in said.items() if is_given]:
        raise ValueError(f"a schema says what columns are for: it takes no {' and no '.join(given)} beside it")


def _open(paths: Sequence[Path], name: FormatName, options: _Options, like: RowSource | None) -> RowSource:
    if name in _NAMED:
        return _open_named(paths, name, options, like)
    row_format = _row_format(paths[0], name, options)
    return TextRows(paths, row_format, on_bad_line=options.on_bad_line, ignore_values=options.ignore_values)


def _open_named(paths: Sequence[Path], name: FormatName, options: _Options, like: RowSource | None) -> ArrowRows:
    roles, sequences = _roles_and_sequences(options)
    choices = ColumnChoices(
        options.label_column,
        options.drop_columns,
        roles,
        options.rating_threshold,
        options.labels == "optional",
        sequences=sequences,
        group_by=options.group_by,
    )
    schema = options.schema if like is None else _schema_of(like)
    open_named = open_csv if name == "csv" else open_parquet
    return open_named(paths, schema, choices, options.on_bad_line)


def _roles_and_sequences(options: _Options) -> tuple[dict[str, Role], tuple[tuple[str, str], ...]]:
    """Returns the roles of columns, and the pairs of a sequence and the column whose ids it has.

    Raises:
        ValueError: `column_roles` and `sequences` disagree.
    """
    read = {name: read_role(role) for name, role in options.column_roles.items()}
    targets = {name: target for name, (_, target) in read.items() if target is not None}
    roles: dict[str, Role] = {name: role for name, (role, _) in read.items()}
    for name, target in options.sequences:
        if roles.get(name, "sequence") != "sequence" or targets.get(name, target) != target:
            raise ValueError(
                f"column {name!r} is a sequence of the ids of {target!r} by sequences, and by column_roles "
                f"{options.column_roles[name]}"
            )
        targets[name] = target
    return roles, tuple(targets.items())


def _schema_of(rows: RowSource) -> Schema | None:
    named = named_rows(rows)
    return None if named is None else named.schema


def named_rows(rows: RowSource) -> ArrowRows | None:
    """Returns the rows of CSV or Parquet as they were opened, whatever was made of their ids; None for others."""
    rows = rows.unhashed if isinstance(rows, HashedRows) else rows
    return rows if isinstance(rows, ArrowRows) else None


def _check_alike(path: Path, rows: RowSource, like: RowSource | None) -> None:
    """Raises ValueError if rows have not the fields and dense features of others."""
    if like is None:
        return
    for kind, here, there in (
        ("fields", rows.field_names, like.field_names),
        ("dense features", rows.dense_names, like.dense_names),
    ):
        if here != there:
            raise ValueError(f"{path} has the {kind} {listed(here)}, and the training rows have {listed(there)}")


def _row_format(path: Path, name: FormatName, options: _Options) -> RowFormat:
    if name == "criteo":
        return criteo_format(labelled=has_labels(path, b"\t", CRITEO_TABS))
    if name == "avazu":
        return avazu_format(labelled=has_labels(path, b",", AVAZU_COMMAS))
    if name == "movielens":
        threshold = DEFAULT_THRESHOLD if options.rating_threshold is None else options.rating_threshold
        return movielens_format(movielens_kind(path), threshold)
    return _sparse_format(path, name, options)


def _sparse_format(path: Path, name: FormatName, options: _Options) -> RowFormat:
    make, count_fields, where = _SPARSE[name]
    if name == "libsvm":
        make = partial(make, group_name=_query_name(path, options.group_by))
    if not options.by_field:
        return make()
    if options.num_fields is not None:
        return make(options.num_fields)
    return make(count_fields(path), reason=f"as in the {where} of {path} (num_fields gives another number)")


def _query_name(path: Path, group_by: str | None) -> str | None:
    """Returns the name of the group of libsvm's rows, or None if they are not grouped by it.

    Raises:
        ValueError: the rows are to be grouped by `qid` and have none.
    """
    has_one = group_by in (None, QUERY) and has_queries(path)
    if group_by == QUERY and not has_one:
        raise ValueError(f"rows are grouped by {QUERY}, and the first lines of {path} have none")
    return QUERY if has_one else None
