"""What a run keeps of its rows: their format, and the names of their fields and dense features; and rows like them.

`schema.json` in the run's directory holds it, so that a model can be built, and further files be compared with the
training files, when those are no longer there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.formats import FormatName, open_rows
from recstore_ops.training.formats.detection import detect_format
from recstore_ops.training.rows.row_source import RowSource
from recstore_ops.training.rows.text_rows import OnBadLine
from recstore_ops.training.training_input import MODELS_BY_FIELD

SCHEMA = "schema.json"
_COUNTING_FORMATS = ("libsvm", "libffm")


@dataclass(frozen=True)
class RunSchema:
    """The form of a run's rows.

    Attributes:
        file_format: of the training files; None for planted rows.
        fields: names of the F fields of every row.
        dense: names of the J dense features of every row.
    """

    file_format: FormatName | None
    fields: tuple[str, ...]
    dense: tuple[str, ...]

    @classmethod
    def of(cls, config: TrainingConfig, rows: RowSource) -> RunSchema:
        """Returns the form of training rows."""
        file_format = config.file_format or (detect_format(config.train[0]) if config.train else None)
        return cls(file_format, rows.field_names, rows.dense_names)

    def write(self, run: Path) -> None:
        """Writes `schema.json` into a run's directory."""
        beside = run / f"{SCHEMA}.new"
        beside.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        beside.replace(run / SCHEMA)

    @classmethod
    def read(cls, run: Path) -> RunSchema:
        """Reads `schema.json` from a run's directory.

        Raises:
            ValueError: there is none.
            OSError: it is damaged.
        """
        path = run / SCHEMA
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(values["file_format"], tuple(values["fields"]), tuple(values["dense"]))
        except FileNotFoundError:
            raise ValueError(f"run {run} has no {SCHEMA}, which names the fields of its rows: train it anew") from None
        except (ValueError, KeyError, TypeError):
            raise OSError(f"{path} is damaged: expected file_format, fields and dense") from None

    def check(self, fields: Sequence[str], dense: Sequence[str], whose: str) -> None:
        """Compares the names of other rows, which messages call `whose`, with these.

        Raises:
            ValueError: they differ.
        """
        for kind, expected, actual in (("fields", self.fields, fields), ("dense features", self.dense, dense)):
            if tuple(actual) != expected:
                raise ValueError(f"the run was trained with the {kind} {_listed(expected)}, {whose} {_listed(actual)}")


def open_rows_of_run(
    config: TrainingConfig, schema: RunSchema, paths: Sequence[Path], on_bad_line: OnBadLine | None = None
) -> RowSource:
    """Opens files with the options that a run was trained with.

    Args:
        config: of the run.
        schema: of the run; the files must have its fields and dense features.
        paths: one file or more, in the format of the training files.
        on_bad_line: None takes the run's.

    Raises:
        ValueError: the files have other fields or dense features; further as `open_rows`.
        OSError: a file cannot be read.
    """
    file_format = schema.file_format or detect_format(paths[0])
    by_field = config.planted is not None or config.model in MODELS_BY_FIELD or config.auc_by is not None
    counts_fields = by_field and file_format in _COUNTING_FORMATS
    rows = open_rows(
        paths,
        file_format=file_format,
        by_field=by_field,
        num_fields=len(schema.fields) if counts_fields else None,
        on_bad_line=on_bad_line or config.on_bad_line,
        ignore_values=config.ignore_values,
        hash_buckets=config.hash_buckets,
        rating_threshold=config.rating_threshold,
        label_column=config.label_column,
        drop_columns=config.drop_columns,
    )
    schema.check(rows.field_names, rows.dense_names, f"{paths[0]} has")
    return rows


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "(none)"
