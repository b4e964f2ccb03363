"""Builds the configured model over the rows' fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from recstore_ops import DistEmbedding, RecStoreClient, Table, table_names, table_statistics
from recstore_ops.config.row_types import ROW_TYPES
from recstore_ops.config.table_options import OnExisting
from recstore_ops.training.data.batch import field_number
from recstore_ops.training.data.row_source import RowSource
from recstore_ops.training.models import (
    DCN,
    DIN,
    DLRM,
    DeepFM,
    FactorizationMachine,
    LogisticRegression,
    TwoTower,
    WideAndDeep,
)
from recstore_ops.training.models.tables import NnTables, StoreTables, Tables, Vocabulary
from recstore_ops.training.run.choices import ModelName
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.optimizers import table_optimizer
from recstore_ops.training.run.training_input import MODELS_BY_FIELD

Existing = Literal["refuse", "drop", "keep"]

MODELS: dict[ModelName, type[nn.Module]] = {
    "lr": LogisticRegression,
    "fm": FactorizationMachine,
    "deepfm": DeepFM,
    "dlrm": DLRM,
    "wide_deep": WideAndDeep,
    "dcn": DCN,
    "din": DIN,
    "two_tower": TwoTower,
}


def build_model(
    config: TrainingConfig,
    name: str,
    rows: RowSource,
    vocabulary: Vocabulary | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    existing: Existing = "refuse",
) -> nn.Module:
    """Returns the configured model with fresh tables `<name>/...`.

    Initial values depend on the configured seed and on the name; those outside the tables on the seed alone.

    Args:
        rows: whose fields and dense features the model is for.
        vocabulary: the ids, if tables are `nn.Embedding`.
        process_group: the processes over which tables of the store are sharded.
        existing: how to treat existing tables `<name>/...`: "refuse" raises if one of the model's has rows, "drop"
            drops all of them before, "keep" continues with them.

    Raises:
        ValueError: an option names a field that the rows lack, or such a table has rows already, so that training would
            not start anew.
    """
    if existing == "drop":
        for table in [table for table in table_names() if table.rpartition("/")[0] == name]:
            RecStoreClient().drop(table)
    tables = (
        _store_tables(config, name, process_group, "share" if existing == "keep" else None)
        if vocabulary is None
        else NnTables(vocabulary.ids, name, seed=config.seed)
    )
    model = model_over(tables, config, rows.field_names, len(rows.dense_names), rows.sequences)
    num_rows = sum(statistics["rows"] for statistics in _statistics(model))
    if num_rows > 0 and existing != "keep":
        raise ValueError(
            f"the tables {name}/... have {num_rows:,} rows already: --table-prefix gives those of this run other "
            "names, --replace-tables gives up the rows that are there"
        )
    return model


def model_over(
    tables: Tables,
    config: TrainingConfig,
    field_names: Sequence[str],
    num_dense: int,
    sequences: Sequence[tuple[str, str]] = (),
) -> nn.Module:
    """Returns the configured model over any tables, for rows of these fields and so many dense features.

    Args:
        tables: makes them.
        config: of the model.
        field_names: of the rows.
        num_dense: dense features.
        sequences: what columns say, pairs of a sequence and the field whose ids it has.

    Raises:
        ValueError: an option names a field that the rows lack, or the model needs a sequence and there is none.
    """
    options = _model_options(config, field_names, num_dense)
    if config.model == "din":
        options["sequences"] = _numbered(all_sequences(config, sequences), field_names)
    # The first parameters depend on the run's seed alone, and the random numbers of the program go on as they were.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return MODELS[config.model](tables, **options)


def _model_options(config: TrainingConfig, names: Sequence[str], num_dense: int) -> dict[str, Any]:
    """The arguments of the model's own, with numbers in place of names of fields."""
    options: dict[str, Any] = {**config.model_options(), "num_dense": num_dense}
    if config.model in MODELS_BY_FIELD:
        options["num_fields"] = len(names)
    if "item_fields" in options:
        options["items"] = [field_number("item_fields", name, names) for name in options.pop("item_fields")]
    return options


def all_sequences(config: TrainingConfig, of_columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Returns the sequences of a configuration, and after them those that columns say besides."""
    configured = config.sequences or ()
    return (*configured, *(pair for pair in of_columns if pair not in configured))


def _numbered(sequences: Sequence[tuple[str, str]], names: Sequence[str]) -> list[tuple[int, ...]]:
    if not sequences:
        raise ValueError("model din needs sequences: --sequence HISTORY=TARGET, or `of` at a sequence in the schema")
    return [tuple(field_number("sequences", name, names) for name in pair) for pair in sequences]


def _store_tables(
    config: TrainingConfig, name: str, process_group: dist.ProcessGroup | None, on_existing: OnExisting | None
) -> StoreTables:
    return StoreTables(
        name,
        table_optimizer(config),
        on_existing=on_existing,
        seed=config.seed,
        dtype=ROW_TYPES[config.row_type],
        admission=config.admission(),
        eviction=config.eviction(),
        memory_limit=config.memory_limit,
        disk=config.disk,
        process_group=process_group,
    )


def table_rows(model: nn.Module) -> int:
    """Returns the number of rows in all tables of a model."""
    return sum(statistics["rows"] for statistics in _statistics(model)) + sum(
        table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)
    )


def table_bytes(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Returns the bytes of memory that the tables of a model take, with their optimizer's state."""
    in_store = sum(statistics["bytes"] for statistics in _statistics(model))
    weights = [table.weight for table in model.modules() if isinstance(table, nn.Embedding)]
    states = [optimizer.state.get(weight, {}) for optimizer in optimizers for weight in weights]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return in_store + sum(tensor.nbytes for tensor in [*weights, *kept])


def tables_of(model: nn.Module) -> list[Table]:
    """Returns the tables of the store in a model."""
    return [module.table for module in model.modules() if isinstance(module, DistEmbedding)]


def _statistics(model: nn.Module) -> list[dict[str, int]]:
    return [table_statistics(table.name) for table in tables_of(model)]
