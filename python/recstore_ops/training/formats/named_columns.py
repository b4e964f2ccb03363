"""Opens files with named columns: finds their schema, or takes the one that is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from recstore_ops.training.formats.arrow_rows import ArrowRows
from recstore_ops.training.formats.csv_dialect import Dialect, detect_dialect
from recstore_ops.training.formats.csv_rows import CsvRows, csv_samples
from recstore_ops.training.formats.parquet_rows import ParquetRows, parquet_samples
from recstore_ops.training.rows.text_rows import OnBadLine
from recstore_ops.training.schema.columns import Schema
from recstore_ops.training.schema.detection import ColumnChoices, detect_schema
from recstore_ops.training.schema.sample import ColumnSample


def open_csv(paths: Sequence[Path], schema: Schema | None, choices: ColumnChoices, on_bad_line: OnBadLine) -> ArrowRows:
    """Returns the rows of text files with separated columns.

    Args:
        paths: the files, each written in its own way.
        schema: of their columns; None finds it in the first file that has a row.
        choices: what the caller says of columns, where there is no schema.
        on_bad_line: as in `open_rows`.

    Raises:
        ValueError: a file's lines are not cut alike, or its columns are others than those of the first.
    """
    # Some programs write parts without a byte.
    paths = [path for path in paths if path.stat().st_size > 0] or paths[:1]
    dialects = {path: _dialect(path) for path in paths}
    choices = replace(choices, has_header=dialects[paths[0]].has_header)
    schema, samples = _schema(paths, schema, choices, lambda path: csv_samples(path, dialects[path]))
    return CsvRows(paths, schema, dialects, samples=samples, on_bad_line=on_bad_line)


def open_parquet(
    paths: Sequence[Path], schema: Schema | None, choices: ColumnChoices, on_bad_line: OnBadLine
) -> ArrowRows:
    """Returns the rows of Parquet files; arguments and errors as `open_csv`."""
    schema, samples = _schema(paths, schema, choices, parquet_samples)
    return ParquetRows(paths, schema, samples=samples, on_bad_line=on_bad_line)


def _dialect(path: Path) -> Dialect:
    dialect = detect_dialect(path)
    if dialect is None:
        raise ValueError(f"{path}: expected lines of equally many columns, between ',', tabs, ';' or '|'")
    return dialect


def _schema(
    paths: Sequence[Path],
    schema: Schema | None,
    choices: ColumnChoices,
    samples_of: Callable[[Path], list[ColumnSample]],
) -> tuple[Schema, list[ColumnSample]]:
    """Returns the schema of files, and the columns of the first one that has a row."""
    path, samples = _first_with_rows(paths, samples_of)
    if schema is None:
        roles = {**dict.fromkeys(dict(choices.sequences), "sequence"), **choices.roles}
        schema = detect_schema(samples, replace(choices, roles=roles), str(path))
    is_there = schema.label is None or schema.label.name in [sample.name for sample in samples]
    if not is_there and choices.may_lack_label:
        schema = schema.without_label()
    if choices.sequences:
        schema = schema.with_sequences(choices.sequences)
    return (schema if choices.group_by is None else schema.grouped_by(choices.group_by)), samples


def _first_with_rows(
    paths: Sequence[Path], samples_of: Callable[[Path], list[ColumnSample]]
) -> tuple[Path, list[ColumnSample]]:
    for path in paths:
        samples = samples_of(path)
        if samples and len(samples[0].cells) > 0:
            return path, samples
    raise ValueError(f"{paths[0]} has no row")
