"""The configuration of a training run's rows; a part of `TrainingConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from recstore_ops.config.option import Option
from recstore_ops.training.data.format_detection import FormatName
from recstore_ops.training.run.choices import RETRIEVAL
from recstore_ops.training.run.option_values import Bounds, read_names, read_path, read_roles
from recstore_ops.training.synthetic.input import PlantedName


@dataclass(frozen=True)
class FollowOptions:
    """How a directory is polled; no part of a run's configuration, so it may differ when the run is resumed.

    Attributes:
        every: the polling interval in seconds.
        until_idle: the run ends when no file has come for so many seconds; None waits until it is asked to end.
        until: the run ends when a file of this name is in the directory and all others are used.

    Raises:
        ValueError: a number is not above 0, or `until` cannot be the name of a file within the directory.
    """

    every: float = 1.0
    until_idle: float | None = None
    until: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("--follow-every", self.every), ("--follow-until-idle", self.until_idle)):
            if value is not None:
                Bounds(above=0).check(name, value)
        if self.until is not None and (self.until in ("", "..") or Path(self.until).name != self.until):
            raise ValueError(f"--follow-until takes the name of a file in the directory, got {self.until!r}")


def check_following(config: Any) -> None:
    """Refuses options without a meaning for files that arrive, before defaults are filled in.

    Args:
        config: a `TrainingConfig`.

    Raises:
        ValueError: names the option and says why.
    """
    is_other = config.epochs not in (None, 1)
    for is_given, sentence in (
        (config.planted, "takes no planted rows: its rows are those of the files"),
        (config.train, "takes no training files: all rows come from the directory"),
        (config.test, "takes no test files: it is evaluated on each file before it is trained on it"),
        (config.tables != "store", f"takes no tables {config.tables}: which ids will come is not known beforehand"),
        (config.model in RETRIEVAL, f"takes no model {config.model}: which items will come is not known beforehand"),
        (is_other, f"passes over each file once: it takes no epochs {config.epochs}"),
        (config.schedule != "constant", f"has no end known beforehand: it takes no schedule {config.schedule}"),
        (config.validation_fraction, "holds no rows out: it is evaluated on each file before it is trained on it"),
        (config.patience, "goes on whatever its evaluations are: it takes no patience"),
        (config.evaluate_every, "is evaluated once a file: it takes no evaluate_every"),
    ):
        if is_given:
            raise ValueError(f"a run that follows files {sentence}")


INPUT = "Input"
"""The group of its options."""

_AT_LEAST_ONE = Bounds(least=1)


@dataclass
class InputConfig:
    """The rows that are trained and evaluated on.

    Attributes:
        train, test: the files; both of one format.
        follow_files: a directory whose files are trained on as they arrive, instead of `train`.
        planted: the kind of planted rows to train on instead of files; see `planted_rows`, `planted_sequences`,
            `planted_retrieval`.
        planted_train_rows, planted_test_rows: how many; None takes the kind's own.
        file_format: None detects it.
        on_bad_line: "stop" or "skip" (and count).
        ignore_values: take every feature value as 1.
        num_fields: of libsvm and libffm rows, for models that distinguish fields; None takes it from the first rows.
        rating_threshold: the least label that counts as positive, if labels are ratings; None takes 4 for MovieLens
            and for a column `rating`.
        label_column: the label's column in files with named columns; None finds it by its name.
        drop_columns: columns of such files that are no features.
        column_roles: roles of further columns, by name; see `recstore_ops.training.data.schema`. A sequence may name
            the column whose ids it has, as `sequence:item`.
        schema: a file with the roles of all columns, as a run writes it.
        hash_buckets: hash ids to this many; None keeps every id as it is.
    """

    train: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    follow_files: Annotated[
        str | None,
        Option(
            "Train on the files of a directory as they arrive.",
            INPUT,
            metavar="DIR",
            type=Path,
            read=read_path,
        ),
    ] = None
    planted: Annotated[
        PlantedName | None,
        Option(
            "Train on generated rows instead: pairs of fields of rank 4 or 8, triples, histories with a target, or "
            "items for queries.",
            INPUT,
        ),
    ] = None
    planted_train_rows: Annotated[
        int | None,
        Option("Training rows to generate.", INPUT, name="planted-rows", shown="by the kind"),
        _AT_LEAST_ONE,
    ] = None
    planted_test_rows: Annotated[int | None, _AT_LEAST_ONE] = None
    file_format: Annotated[
        FormatName | None, Option("Format of all files.", INPUT, name="format", shown="detected")
    ] = None
    on_bad_line: Annotated[Literal["stop", "skip"], Option("Stop at a bad line, or skip and count it.", INPUT)] = "stop"
    ignore_values: Annotated[bool, Option("Take every value of libsvm and libffm as 1.", INPUT)] = False
    num_fields: Annotated[
        int | None,
        Option("Fields of a row of libsvm or libffm.", INPUT, shown="from first rows"),
        _AT_LEAST_ONE,
    ] = None
    rating_threshold: Annotated[
        float | None,
        Option("The least positive label.", INPUT, shown="4 for ratings"),
    ] = None
    label_column: Annotated[
        str | None,
        Option("The column of labels.", INPUT, shown="label, click, target or rating"),
    ] = None
    drop_columns: Annotated[
        tuple[str, ...],
        Option(
            "A column that is no feature; may be repeated.",
            INPUT,
            name="drop-column",
            type=list[str],
            read=read_names,
        ),
    ] = ()
    column_roles: Annotated[
        dict[str, str],
        Option(
            "Role of a column: label, categorical, ids, sequence, number, vector, weight, time, group or ignored; "
            "sequence:item has ids of item. May be repeated.",
            INPUT,
            name="column",
            metavar="NAME=ROLE",
            type=list[str],
            read=read_roles,
            shown="by name and cells",
        ),
    ] = field(default_factory=dict)
    schema: Annotated[
        str | None,
        Option(
            "Roles of all columns: schema.toml of a run, perhaps changed.",
            INPUT,
            type=Path,
            read=read_path,
        ),
    ] = None
    hash_buckets: Annotated[
        int | None,
        Option(
            "Hash all ids to this many.",
            INPUT,
            shown="a row for each id",
        ),
        _AT_LEAST_ONE,
    ] = None
