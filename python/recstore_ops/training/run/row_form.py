"""The form of a run's rows: their format, and the names of their fields and dense features; and rows of that form.

`rows.json` in the run's directory holds the form, with `schema.toml` if columns have names. From it a model can be
built, and further files be compared with the training files, when those are no longer there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from recstore_ops.config.directory import read_file, replace_file
from recstore_ops.training.data.format_detection import FormatName, detect_format
from recstore_ops.training.data.opening import open_rows
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.data.schema_file import SCHEMA, read_schema
from recstore_ops.training.data.text_rows import OnBadLine
from recstore_ops.training.report.recorded_run import FORM
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.training_input import TrainingInput, is_by_field

Labels = Literal["required", "optional"]
_COUNTING_FORMATS = ("libsvm", "libffm")


@dataclass(frozen=True)
class RowForm:
    """The form of a run's rows.

    Attributes:
        file_format: of the training files; None for planted rows.
        fields: names of the F fields of every row.
        dense: names of the J dense features of every row.
        columns: the roles of the columns of files, if they have names.
        group: the name of the rows' groups; None if batches have no groups.
    """

    file_format: FormatName | None
    fields: tuple[str, ...]
    dense: tuple[str, ...]
    columns: Schema | None = None
    group: str | None = None

    @property
    def sequences(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a sequence and the field whose ids it has, from the roles of columns."""
        return () if self.columns is None else self.columns.sequences

    @classmethod
    def of(cls, config: TrainingConfig, rows: TrainingInput) -> RowForm:
        """Returns the form of training rows."""
        file_format = config.file_format or (detect_format(config.train[0]) if config.train else None)
        train = rows.train
        return cls(file_format, train.field_names, train.dense_names, rows.schema, train.group_name)

    def write(self, run: Path) -> None:
        """Writes `rows.json` into a run's directory; `schema.toml` is written before a run begins."""
        values = {
            "file_format": self.file_format,
            "fields": self.fields,
            "dense": self.dense,
            "group": self.group,
        }
        replace_file(run / FORM, (json.dumps(values, indent=2) + "\n").encode())

    @classmethod
    def read(cls, run: Path) -> RowForm:
        """Reads `rows.json` from a run's directory, and `schema.toml` if it is there.

        Raises:
            ValueError: there is none, or `schema.toml` is no schema.
            OSError: it is damaged.
        """
        path = run / FORM
        try:
            values = json.loads(read_file(path))
            form = cls(
                values["file_format"], tuple(values["fields"]), tuple(values["dense"]), None, values.get("group")
            )
        except FileNotFoundError:
            raise ValueError(f"run {run} has no {FORM}, which names the fields of its rows: train it anew") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OSError(f"{path} is damaged: expected file_format, fields and dense") from None

        schema = run / SCHEMA
        return replace(form, columns=read_schema(schema)) if schema.exists() else form

    def check(self, fields: Sequence[str], dense: Sequence[str], whose: str) -> None:
        """Compares the names of other rows, which messages call `whose`, with these.

        Raises:
            ValueError: they differ.
        """
        for kind, expected, actual in (("fields", self.fields, fields), ("dense features", self.dense, dense)):
            if tuple(actual) != expected:
                raise ValueError(f"the run was trained with the {kind} {_listed(expected)}, {whose} {_listed(actual)}")


def open_rows_of_run(
    config: TrainingConfig,
    form: RowForm,
    paths: Sequence[Path],
    on_bad_line: OnBadLine | None = None,
    labels: Labels = "optional",
    group_by: str | None = None,
) -> RowSource:
    """Opens files with the options that a run was trained with.

    Args:
        config: of the run.
        form: of the run's rows; the files must have their fields and dense features.
        paths: one file or more, in the format of the training files; of named columns, in any with names.
        on_bad_line: None takes the run's.
        labels: "optional" opens rows without labels too, which get NaN.
        group_by: as in `open_rows`; None takes the run's.

    Raises:
        ValueError: the files have other fields or dense features; further as `open_rows`.
        OSError: a file cannot be read.
    """
    open_them = _open_named if form.columns else _open
    rows = open_them(
        config, form, paths, on_bad_line or config.on_bad_line, labels, config.auc_by if group_by is None else group_by
    )
    form.check(rows.field_names, rows.dense_names, f"{paths[0]} has")
    return rows


def _open_named(
    config: TrainingConfig,
    form: RowForm,
    paths: Sequence[Path],
    on_bad_line: OnBadLine,
    labels: Labels,
    group_by: str | None,
) -> RowSource:
    return open_rows(
        paths,
        on_bad_line=on_bad_line,
        hash_buckets=config.hash_buckets,
        schema=form.columns,
        labels=labels,
        sequences=config.sequences or (),
        group_by=group_by,
    )


def _open(
    config: TrainingConfig,
    form: RowForm,
    paths: Sequence[Path],
    on_bad_line: OnBadLine,
    labels: Labels,
    group_by: str | None,
) -> RowSource:
    file_format = form.file_format or detect_format(paths[0])
    by_field = is_by_field(config)
    counts_fields = by_field and file_format in _COUNTING_FORMATS
    return open_rows(
        paths,
        file_format=file_format,
        by_field=by_field,
        num_fields=len(form.fields) if counts_fields else None,
        on_bad_line=on_bad_line,
        ignore_values=config.ignore_values,
        hash_buckets=config.hash_buckets,
        rating_threshold=config.rating_threshold,
        labels=labels,
        sequences=config.sequences or (),
        group_by=group_by,
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "(none)"
