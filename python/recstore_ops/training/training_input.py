"""The rows of a run: training, validation and test part, from files or planted."""

from __future__ import annotations

from dataclasses import dataclass

from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.dataset import (
    CachedRows,
    HeldOutRows,
    MemoryRows,
    RowSource,
    TextRows,
)
from recstore_ops.training.planted import planted_interactions


@dataclass(frozen=True)
class TrainingInput:
    """The parts of a run's rows.

    Attributes:
        train: the training rows without the validation rows.
        validation: held out of the training rows; None without.
        test: only ever evaluated; None without.
        files: what reads the files; knows how many lines were skipped.
        note: what is known of the data beforehand, one sentence.
    """

    train: RowSource
    validation: RowSource | None
    test: RowSource | None
    files: tuple[TextRows, ...] = ()
    note: str | None = None


def open_input(config: TrainingConfig) -> TrainingInput:
    """Returns the rows that a configuration names; files are read when the rows are asked for."""
    return _planted_input(config) if config.planted else _file_input(config)


def _planted_input(config: TrainingConfig) -> TrainingInput:
    planted = planted_interactions(config.seed)
    train, validation = _hold_out(config, MemoryRows(planted.train))
    note = (
        f"planted interactions: the true model has test AUC {planted.bayes_auc:.4f}, "
        f"logloss {planted.bayes_logloss:.4f}"
    )
    return TrainingInput(train, validation, MemoryRows(planted.test), note=note)


def _file_input(config: TrainingConfig) -> TrainingInput:
    files = [
        TextRows(
            paths,
            file_format=config.file_format,
            on_bad_line=config.on_bad_line,
            ignore_values=config.ignore_values,
        )
        for paths in (config.train, config.test)
        if paths
    ]
    train, *test = [CachedRows(rows, config.cache_bytes) for rows in files]
    train, validation = _hold_out(config, train)
    return TrainingInput(train, validation, test[0] if test else None, files=tuple(files))


def _hold_out(config: TrainingConfig, rows: RowSource) -> tuple[RowSource, RowSource | None]:
    fraction, seed = config.validation_fraction, config.seed
    if fraction == 0:
        return rows, None
    return (
        HeldOutRows(rows, fraction, seed=seed, part="training"),
        HeldOutRows(rows, fraction, seed=seed, part="validation"),
    )
