"""How a run begins: anew, or with the rows and parameters of another run's last save.

If both runs configure their tables alike, the checkpoint is loaded into the new tables as it is, with all that they
know of their rows. Otherwise its rows are read first and then written to tables of the new configuration, with their
slots if both runs have the same optimizer. This takes the memory of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops import RecStoreClient, Table, _native, table_names
from recstore_ops.config.paths import user_path
from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.ops import operators
from recstore_ops.servers.choosing import EMBEDDED, current_ps_backend, embedded_for
from recstore_ops.state import OptimizerState, TableRows, native_state, optimizer_state, replace_rows, table_rows
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.run.build import Existing, all_sequences, build_model, tables_of
from recstore_ops.training.run.choices import MODEL_OPTIONS, InitWhat
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.dense_parameters import dense_parameters, load_dense_parameters
from recstore_ops.training.run.event_times import times_before
from recstore_ops.training.run.job import Job
from recstore_ops.training.run.optimizers import dense_optimizer_name
from recstore_ops.training.run.saved_run import SavedRun, short_name

_MAY_DIFFER = ("init_std", "dropout")
_OF_THE_MODEL = (
    *("model", "bias", "hash_buckets"),
    *sorted({name for options in MODEL_OPTIONS.values() for name in options}.difference(_MAY_DIFFER)),
)
"""The options in which both runs must agree."""

_OF_THE_ROWS = ("rating_threshold", "ignore_values")

_OF_TABLES = (
    *("table_prefix", "seed", "init_std", "row_type", "admit_after", "shared_rows", "ttl", "min_norm", "capacity"),
    *("eviction_policy", "eviction_interval", "optimizer", "optimizer_options", "convention", "beta", "l1", "l2"),
)
"""The options by which tables differ; learning rate, weight decay and memory are no part of a checkpoint."""

_Kept = tuple[TableRows, OptimizerState]


def _rule(config: TrainingConfig) -> str:
    """Names the optimizer of a run's tables and its arguments: runs of one rule keep the same slots."""
    arguments = [f"{name}={value}" for name, value in sorted(config.optimizer_options.items())]
    return " ".join([config.optimizer, *arguments])


@dataclass(frozen=True)
class DenseStart:
    """The initial state of optimizers outside the tables, and of dropout.

    Attributes:
        optimizers: the state of each, without its options; None begins anew.
        random: the state of torch's random numbers; None follows the seed.
        event_times: of the other run, counted in steps from its last one; None if it kept none.
    """

    optimizers: list[dict[str, Any]] | None
    random: Tensor | None
    event_times: dict[str, Any] | None = None


class OtherRun:
    """The run that another one begins with.

    Args:
        config: of the new run, which names the other one.
        rows: its training rows.
        job: the processes that train together.

    Raises:
        ValueError: the run is not found or has no save, or its model, fields or dense features differ. Also if it lacks
            a table that is asked for, or has another optimizer and its optimizer state is asked for.
        OSError: a file of it is damaged.
    """

    def __init__(self, config: TrainingConfig, rows: RowSource, job: Job) -> None:
        assert config.init_from is not None, "a run that begins with another one"
        self._config = config
        self._job = job
        self._saved = SavedRun.read(Path(user_path(config.init_from, "init_from")), "last")
        self._check_model(rows)
        self._saved.form.check(rows.field_names, rows.dense_names, "this one has")
        self.what: InitWhat = self._chosen_what()
        self._chosen = self._chosen_tables()
        differing = self._differing()
        if differing and job.group is not None:
            raise ValueError(
                f"run {self._saved.path} differs in {', '.join(differing)}: several processes begin only with all "
                "tables and the optimizer of a run whose tables are configured as theirs"
            )
        self._is_loaded_whole = not differing

    def build(self, name: str, rows: RowSource, existing: Existing = "refuse") -> nn.Module:
        """Returns the configured model with tables `<name>/...` and parameters as they begin.

        Args:
            name, existing: as in `build_model`.
            rows: the training rows.

        Raises:
            ValueError: such a table has rows already, or lies on servers, which cannot take the other run's state; or
                the other run has other parameters.
            OSError: a file of it is damaged.
        """
        # Before the new tables are opened, which may have the names of those that are read.
        kept = {} if self._is_loaded_whole else self._read_tables()
        if kept:
            self._check_place()
        model = build_model(self._config, name, rows, process_group=self._job.group, existing=existing)
        if self._is_loaded_whole:
            self._saved.load_tables(self._job.group)
        for table in tables_of(model):
            if self._is_loaded_whole:
                # A load brings the rate of the other run's last step.
                _native.set_optimizer_learning_rate(table.table_id, float(self._config.lr or 0))
            elif short_name(table.name) in kept:
                self._put(table, *kept.pop(short_name(table.name)))
        load_dense_parameters(model, self._parameters_of(model))
        return model

    def dense_start(self) -> DenseStart:
        """Returns the state outside the tables from the other run's save."""
        state, other = self._saved.state, self._saved.config
        times = times_before(state.get("event_times"), state["step"])
        if self.what == "rows":
            return DenseStart(None, None, times)
        is_same = dense_optimizer_name(self._config) == dense_optimizer_name(other)
        is_same = is_same and self._config.dense_options == other.dense_options
        return DenseStart(
            state["optimizers"] if is_same else None,
            state["random"] if self._config.seed == other.seed else None,
            times,
        )

    def note(self) -> str:
        """Says in a sentence what the run begins with."""
        state = self._saved.state
        tables = ", ".join(sorted(self._chosen))
        what = "rows and optimizer state" if self.what == "rows-and-optimizer" else "rows"
        return f"beginning with run {self._saved.path} after its step {state['step']:,}: {what} of the tables {tables}"

    def _parameters_of(self, model: nn.Module) -> dict[str, Tensor]:
        """The saved parameters by the names that the model has for them: dropout moves the numbers of layers."""
        saved, names = self._saved.state["model"], [name for name, _ in dense_parameters(model)]
        return dict(zip(names, saved.values(), strict=True)) if len(names) == len(saved) else saved

    def _check_model(self, rows: RowSource) -> None:
        # Of columns with names, the other run's schema says what labels and numbers are.
        for name in _OF_THE_MODEL if self._saved.form.columns else (*_OF_THE_MODEL, *_OF_THE_ROWS):
            expected, actual = getattr(self._saved.config, name), getattr(self._config, name)
            if name == "sequences":
                expected = all_sequences(self._saved.config, self._saved.form.sequences)
                actual = all_sequences(self._config, rows.sequences)
            if expected != actual:
                raise ValueError(
                    f"run {self._saved.path} was trained with {name} {expected}, this one has {name} {actual}: a run "
                    "begins with one of the same model"
                )

    def _chosen_what(self) -> InitWhat:
        own, other, asked = _rule(self._config), _rule(self._saved.config), self._config.init_what
        if asked == "rows-and-optimizer" and own != other:
            raise ValueError(
                f"run {self._saved.path} was trained with optimizer {other}, this one has optimizer {own}: only its "
                "rows can be taken, init_what rows"
            )
        return asked or ("rows-and-optimizer" if own == other else "rows")

    def _chosen_tables(self) -> set[str]:
        there = {short_name(table) for table in self._saved.tables}
        asked = {short_name(table) for table in self._config.init_tables}
        if asked - there:
            raise ValueError(
                f"run {self._saved.path} has no table {', '.join(sorted(asked - there))}; it has "
                f"{', '.join(sorted(there))}"
            )
        return asked or there

    def _differing(self) -> list[str]:
        """The options for which the other run's tables cannot be loaded as they are."""
        own, other = self._config, self._saved.config
        names = [name for name in _OF_TABLES if getattr(own, name) != getattr(other, name)]
        # How long rows live by event times is no part of a checkpoint, but whether they do is.
        names += ["ttl_time"] if (own.ttl_time is None) != (other.ttl_time is None) else []
        takes_all = len(self._chosen) == len(self._saved.tables)
        return [
            *names,
            *(["init_tables"] if not takes_all else []),
            *(["init_what"] if self.what == "rows" and not {"optimizer", "optimizer_options"} & {*names} else []),
        ]

    def _read_tables(self) -> dict[str, _Kept]:
        """Loads the other run's tables, reads them and drops them again."""
        with embedded_for("init_from"):
            taken = sorted({*self._saved.tables} & {*table_names()})
            if taken:
                raise ValueError(f"this process has a table {taken[0]} already, under which a run is read")
            try:
                self._saved.load_tables()
                chosen = [table for table in self._saved.tables if short_name(table) in self._chosen]
                return {short_name(name): _read(Table.open(name)) for name in chosen}
            finally:
                for name in {*self._saved.tables} & {*table_names()}:
                    RecStoreClient().drop(name)

    def _check_place(self) -> None:
        """Checks that the tables' store can take the rows and state that were read."""
        table_names()  # The first call decides where.
        if self.what == "rows-and-optimizer" and current_ps_backend() != EMBEDDED:
            raise ValueError(
                f"run {self._saved.path} differs in {', '.join(self._differing())}, and servers take optimizer state "
                "only with a whole checkpoint: --init-what rows begins with its rows alone"
            )

    def _put(self, table: Table, rows: TableRows, state: OptimizerState) -> None:
        ids_N, slots, progress = state
        progress = {**progress, "learning_rate": table.learning_rate()[0], "learning_rate_was_set": False}
        if self.what == "rows-and-optimizer":
            # The step comes first: rows that are written count as used at it, or eviction would find them too old.
            _put_state(table, ids_N[:0], {name: slot[:0] for name, slot in slots.items()}, progress)
        replace_rows(table, (rows[0], rows[1].to(VALUE_TYPES[table.config.dtype])))
        if self.what == "rows-and-optimizer" and slots:
            # Under a limit of memory some may have left again.
            is_there_N = torch.isin(ids_N, operators.hashtable_ids(table.handle))
            _put_state(table, ids_N[is_there_N], {name: slot[is_there_N] for name, slot in slots.items()}, progress)


def _read(table: Table) -> _Kept:
    return table_rows(table), optimizer_state(table, table.learning_rate()[0])


def _put_state(table: Table, ids_N: Tensor, slots: dict[str, Tensor], progress: dict[str, Any]) -> None:
    _native.put_optimizer_states([native_state(table, (ids_N, slots, progress))])
