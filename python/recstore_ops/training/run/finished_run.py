"""The model of a run that is over, for predictions and whatever else one does with a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding, RecStoreClient, Table, TableConfig, table_names
from recstore_ops._native import copy_table
from recstore_ops.config.html_table import html_facts
from recstore_ops.config.paths import user_path
from recstore_ops.config.row_types import ROW_TYPES
from recstore_ops.servers.choosing import embedded_for
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.data.text_rows import OnBadLine
from recstore_ops.training.metrics.evaluation import Scores, predict
from recstore_ops.training.run.build import model_over, tables_of
from recstore_ops.training.run.choices import RETRIEVAL
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.dense_parameters import load_dense_parameters
from recstore_ops.training.run.row_form import RowForm, open_rows_of_run
from recstore_ops.training.run.saved_run import SavedRun, Which, short_name


class LoadedRun:
    """The model of a run, with the tables of one of its checkpoints.

    Attributes:
        config: what the run was configured by.
        form: of its rows.
        model: takes a `Batch` and gives logits, float32 [B]; in evaluation mode. One that retrieves gives scores, and
            has `query_vectors` and `item_vectors`.
        step: the steps that it was trained for.
    """

    def __init__(self, config: TrainingConfig, form: RowForm, model: nn.Module, step: int) -> None:
        self.config = config
        self.form = form
        self.model = model
        self.step = step

    def open_rows(
        self, paths: Sequence[Path], on_bad_line: OnBadLine | None = None, *, group_by: str | None = None
    ) -> RowSource:
        """Opens files with the options that the run was trained with.

        Args:
            paths: one file or more, with the fields and dense features of the training files.
            on_bad_line: "stop" or "skip"; None takes the run's.
            group_by: the column by which rows are grouped, as `open_rows` takes it; None takes the run's.

        Raises:
            ValueError: the files have other fields or dense features, or another format.
            OSError: a file cannot be read.
        """
        return open_rows_of_run(self.config, self.form, paths, on_bad_line, group_by=group_by)

    def _repr_html_(self) -> str:
        tables = {
            f"table {short_name(table.name)}": f"{len(table):,} rows of {table.dim}" for table in tables_of(self.model)
        }
        options = {name: value for name, value in asdict(self.config).items() if value is not None}
        return html_facts(f"{self.config.model} after step {self.step:,}", tables | options)

    def table(self, name: str) -> Table:
        """Returns the table that the model calls `name`, as `v`.

        Raises:
            ValueError: the model has no such table.
        """
        tables = {short_name(table.name): table for table in tables_of(self.model)}
        if name not in tables:
            raise ValueError(f"the model {self.config.model} has no table {name}; it has {', '.join(sorted(tables))}")
        return tables[name]

    def scores(self, batches: Iterable[Batch], *, segment_field: int | None = None) -> Iterator[Scores]:
        """Yields what the model says of each batch, with segments as `predict` takes them.

        No table gets a row: an unknown id reads as its initial row.

        Raises:
            ValueError: the model retrieves.
        """
        self.check_gives_probabilities()
        for batch in batches:
            yield predict(self.model, [batch], segment_field=segment_field)

    def check_gives_probabilities(self) -> None:
        """Refuses a model that retrieves.

        Raises:
            ValueError: it does.
        """
        if self.config.model in RETRIEVAL:
            raise ValueError(
                f"the scores of model {self.config.model} are no probabilities: recstore evaluate ranks items by them, "
                "and in Python load(run).model has query_vectors and item_vectors, whose products rank items"
            )

    def predict(self, rows: Iterable[Batch]) -> Tensor:
        """Returns the probability of each row, float32 [B], in order; keeps 4 bytes a row.

        Raises:
            ValueError: the model retrieves.
        """
        parts = [scores.probabilities().float() for scores in self.scores(rows)]
        return torch.cat([torch.empty(0, dtype=torch.float32, device="cpu"), *parts])


def load(run: Path, *, which: Which = "best", name: str | None = None) -> LoadedRun:
    """Opens the model of a run in this process, with tables of its own.

    The training files are not needed. A run of several processes is loaded by one.

    Args:
        run: the run's directory.
        which: the checkpoint of the best evaluation or the last one.
        name: the tables get the names `<name>/...`; None keeps those that they were trained under. A second run of the
            same model needs one.

    Raises:
        ValueError: there is no such run, nothing of it was saved, it was trained with tables "nn", this process has
            tables of these names already, or keeps its tables on servers.
        OSError: a file is damaged.
    """
    saved = SavedRun.read(Path(user_path(run, "run")), which)
    wanted = {table: table if name is None else f"{name}/{short_name(table)}" for table in saved.tables}
    with embedded_for("load"):
        # Both: a checkpoint loads under the names that it has, and the tables are copied from there.
        _check_free({*wanted, *wanted.values()}, saved.path)
        try:
            model = _opened(saved, wanted)
        except BaseException:
            # All these names were free: a table that has one by now was made by this load.
            _drop({*wanted, *wanted.values()})
            raise
    return LoadedRun(saved.config, saved.form, model, saved.state["step"])


def _check_free(names: set[str], run: Path) -> None:
    taken = sorted(names & set(table_names()))
    if taken:
        raise ValueError(
            f"run {run} cannot be loaded: this process has a table {taken[0]!r} already; load the run under another "
            "name, and before any model whose tables have the names that the run was trained under"
        )


def _opened(saved: SavedRun, wanted: dict[str, str]) -> nn.Module:
    saved.load_tables()
    # One after the other, so that no more than one table is in memory twice.
    for trained_as, table in wanted.items():
        if table != trained_as:
            copy_table(Table.open(trained_as).table_id, table)
            RecStoreClient().drop(trained_as)
    tables = _OpenTables({short_name(table): table for table in wanted.values()})
    model = model_over(tables, saved.config, saved.form.fields, len(saved.form.dense), saved.form.sequences)
    load_dense_parameters(model, saved.state["model"])
    return model.eval()


def _drop(names: set[str]) -> None:
    for name in names & set(table_names()):
        RecStoreClient().drop(name)


class _OpenTables:
    """Tables that are open, as `Tables`: each with the configuration that it has.

    Args:
        names: of the tables, by the names that models ask by.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def __call__(self, name: str, dim: int, std: float = 0.0) -> DistEmbedding:
        if name not in self._names:
            raise OSError(f"the checkpoint has no table {name}, only {', '.join(sorted(self._names))}")
        table = Table.open(self._names[name])
        if table.dim != dim:
            raise OSError(f"table {table.name!r} of the checkpoint has dim {table.dim}, the run's configuration {dim}")
        return DistEmbedding(table.config.num_embeddings, dim, table.name, **_options(table.config))


def _options(config: TableConfig) -> dict[str, Any]:
    options = {name: value for name, value in asdict(config).items() if name != "num_embeddings"}
    return {**options, "dtype": ROW_TYPES[config.dtype], "on_existing": "share"}
