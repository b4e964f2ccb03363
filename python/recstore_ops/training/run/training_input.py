"""The rows of a run: training, validation and test part, from files or planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from recstore_ops.config.paths import user_path
from recstore_ops.training.data.arrow_rows import ArrowRows
from recstore_ops.training.data.delimited import DEFAULT_THRESHOLD
from recstore_ops.training.data.format_detection import detect_format
from recstore_ops.training.data.opening import named_rows, open_rows
from recstore_ops.training.data.query_items import QueryItemSplit
from recstore_ops.training.data.row_source import CachedRows, HeldOutRows, MappedRows, MemoryRows, RowSource
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.data.schema_file import SCHEMA, positive_share, read_schema, schema_notes, schema_table
from recstore_ops.training.data.sparse_lines import QUERY
from recstore_ops.training.metrics.retrieval import Candidates
from recstore_ops.training.models.tables import Vocabulary
from recstore_ops.training.run.choices import OF_NAMED_COLUMNS, RETRIEVAL
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.synthetic.input import planted_input

# The models that see the fields of a row; the others take all of its ids alike.
MODELS_BY_FIELD = ("deepfm", "dlrm", "wide_deep", "dcn", "din", "two_tower")


@dataclass(frozen=True)
class TrainingInput:
    """The parts of a run's rows.

    Attributes:
        train: the training rows without the validation rows.
        validation: held out of the training rows; None without.
        test: only ever evaluated; None without.
        read: the sources of the rows, which count skipped lines.
        notes: facts about the rows that are known beforehand, in sentences.
        theory: computes the known figures of planted rows; None for files.
        schema: the roles of the columns of files, if they have names.
        candidates: the items that a model that retrieves chooses from; None if they are still to be found.
    """

    train: RowSource
    validation: RowSource | None
    test: RowSource | None
    read: tuple[RowSource, ...] = ()
    notes: tuple[str, ...] = ()
    schema: Schema | None = None
    candidates: Candidates | None = None
    theory: Callable[[], str] | None = None

    def schema_table(self) -> Table | None:
        """Returns the roles of the columns as a table; None if columns have no names."""
        rows = named_rows(self.read[0]) if self.read else None
        return None if rows is None else schema_table(rows.schema, rows.samples, _title(rows))

    def vocabulary(self) -> Vocabulary:
        """Returns the ids of all parts, in one pass."""
        sources = self.read or (self.train, self.validation, self.test)
        return Vocabulary(block for source in sources if source is not None for block in source)

    def with_candidates(self, sides: QueryItemSplit) -> TrainingInput:
        """Returns the same rows with the distinct items of all parts as candidates, found in a pass over them.

        Without validation and test rows there is nothing to rank them for, and no pass.
        """
        if self.candidates is not None or (self.validation is None and self.test is None):
            return self
        parts = (self.train, self.validation, self.test)
        return replace(self, candidates=Candidates(sides, (part for part in parts if part is not None)))

    def in_places_of(self, vocabulary: Vocabulary) -> TrainingInput:
        """Returns the same rows with each id's place in a vocabulary."""
        train, validation, test = (
            None if part is None else MappedRows(part, vocabulary.places)
            for part in (self.train, self.validation, self.test)
        )
        assert train is not None
        return replace(self, train=train, validation=validation, test=test)


def file_sizes(config: TrainingConfig) -> dict[str, int]:
    """Returns the bytes of each file of a configuration."""
    return {str(path): path.stat().st_size for path in (*config.train, *config.test)}


def check_file_sizes(config: TrainingConfig, expected: dict[str, int]) -> None:
    """Raises ValueError if a file's size is no longer what `file_sizes` returned."""
    for path, size in file_sizes(config).items():
        if size != expected[path]:
            raise ValueError(f"{path} had {expected[path]:,} bytes when the run was saved, now it has {size:,}")


def open_input(config: TrainingConfig) -> TrainingInput:
    """Returns the rows that a configuration names; files are read when the rows are asked for."""
    return _file_input(config) if config.planted is None else _planted_input(config)


def _planted_input(config: TrainingConfig) -> TrainingInput:
    assert config.planted is not None
    planted = planted_input(config.planted, config.seed, config.planted_train_rows, config.planted_test_rows)
    train, test = (MemoryRows(part, field_names=planted.field_names) for part in (planted.train, planted.test))
    train, validation = _hold_out(config, train)
    return TrainingInput(train, validation, test, theory=planted.theory)


def _file_input(config: TrainingConfig) -> TrainingInput:
    read = [_open_files(config, config.train, config.num_fields)]
    named = named_rows(read[0])
    _check_time(config, None if named is None else named.schema)
    _check_group(config, None if named is None else named.schema)
    notes = _format_notes(config) if named is None else list(schema_notes(named.schema, named.samples))
    if named is not None and named.schema.time is not None and config.ttl_time is None:
        notes.append(f"{named.schema.time.name} is read as the event time, which only --ttl-time uses")
    if config.test:
        test_rows = _open_files(config, config.test, _fields_of_test_rows(config, read[0]), read[0])
        if test_rows.has_labels:
            read.append(test_rows)
        else:
            notes.append(f"{config.test[0]} has no labels: the test rows are not evaluated")
    train, *test = [CachedRows(rows, config.cache_bytes) for rows in read]
    train, validation = _hold_out(config, train)
    if validation is not None:
        # Without it, every evaluation of rows that are not kept would read all training files again.
        validation = CachedRows(validation, config.cache_bytes)
    return TrainingInput(
        train,
        validation,
        test[0] if test else None,
        read=tuple(read),
        notes=tuple(notes),
        schema=None if named is None else named.schema,
    )


def _format_notes(config: TrainingConfig) -> list[str]:
    """Names the format of files without named columns if it is a guess, and the ratings that are positive."""
    path, file_format = config.train[0], config.file_format or detect_format(config.train[0])
    if file_format == "movielens" and config.rating_threshold is None:
        rule = f"a rating of {DEFAULT_THRESHOLD:g} or more is positive, --rating-threshold chooses another"
        return [f"{path} is read as movielens: {rule}"]
    return [] if config.file_format is not None else [f"{path} is read as {file_format}"]


def _check_time(config: TrainingConfig, schema: Schema | None) -> None:
    """Raises ValueError if rows are to live by a time that they do not have."""
    if config.ttl_time is not None and (schema is None or schema.time is None):
        raise ValueError("ttl_time needs the event times of rows: --column NAME=time names a column of CSV or Parquet")


def _check_group(config: TrainingConfig, schema: Schema | None) -> None:
    """Raises ValueError if a column is the group of rows, and they are not to be grouped, or by another one."""
    if schema is not None and schema.group is not None and schema.group.has_amounts:
        raise ValueError(
            f"auc_by names column {schema.group.name!r}, which has the role {schema.group.role} and is "
            f"{schema.group.type}: expected integers, strings or booleans that are no amounts"
        )
    group = None if schema is None else next(iter(schema.of_role("group")), None)
    if group is None:
        return
    if config.model in RETRIEVAL:
        raise ValueError(
            f"column {group.name!r} has the role group, and model {config.model} ranks items for queries, not for "
            f"groups: --column {group.name}=ignored leaves it out"
        )
    if config.auc_by not in (None, group.name):
        raise ValueError(
            f"column {group.name!r} has the role group, and auc_by names {config.auc_by!r}: rows are grouped by one"
        )


def _title(rows: ArrowRows) -> str:
    share = positive_share(rows.schema, rows.samples)
    positive = "" if share is None else f", {share:.1%} positive"
    sampled = len(rows.samples[0].cells) if rows.samples else 0
    return f"columns of {rows.schema.source} ({rows.format_name}; {sampled:,} rows looked at{positive})"


def _fields_of_test_rows(config: TrainingConfig, train: RowSource) -> int | None:
    # Where fields are counted in the files, the training files decide for both.
    file_format = config.file_format or detect_format(config.train[0])
    counts_fields = file_format in ("libsvm", "libffm") and is_by_field(config)
    return len(train.field_names) if counts_fields else config.num_fields


def is_by_field(config: TrainingConfig) -> bool:
    """Whether the rows of formats that can do without fields have them."""
    return config.planted is not None or config.model in MODELS_BY_FIELD or config.auc_by not in (None, QUERY)


def _open_files(
    config: TrainingConfig, paths: tuple[Path, ...], num_fields: int | None, like: RowSource | None = None
) -> RowSource:
    return open_rows(
        paths,
        file_format=config.file_format,
        by_field=is_by_field(config),
        num_fields=num_fields,
        on_bad_line=config.on_bad_line,
        ignore_values=config.ignore_values,
        hash_buckets=config.hash_buckets,
        rating_threshold=config.rating_threshold,
        label_column=config.label_column if like is None else None,
        drop_columns=config.drop_columns if like is None else (),
        column_roles=config.column_roles if like is None else {},
        schema=_given_schema(config) if like is None else None,
        labels="required" if like is None else "optional",
        sequences=config.sequences or (),
        group_by=config.auc_by,
        like=like,
    )


def _given_schema(config: TrainingConfig) -> Schema | None:
    """Returns the schema of the configuration, or of the run that this one begins with; None without either.

    Raises:
        ValueError: the file is no schema, or the configuration has options for columns besides the other run's schema.
    """
    if config.schema is not None:
        return read_schema(Path(config.schema))
    if config.init_from is None:
        return None
    path = Path(user_path(config.init_from, "init_from")) / SCHEMA
    if not path.exists():
        return None
    if given := [name for name in OF_NAMED_COLUMNS if getattr(config, name)]:
        raise ValueError(f"columns are for what {path} says: with init_from there is no {' and no '.join(given)}")
    return read_schema(path)


def _hold_out(config: TrainingConfig, rows: RowSource) -> tuple[RowSource, RowSource | None]:
    # One seed for both parts: they draw the same numbers, so that each row is in exactly one of them.
    fraction, seed = config.validation_fraction, config.seed
    if not fraction:
        return rows, None
    return (
        HeldOutRows(rows, fraction, seed=seed, part="training"),
        HeldOutRows(rows, fraction, seed=seed, part="validation"),
    )
