"""The configuration of a training run's model and its tables; a part of `TrainingConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from recstore_ops.config.option import Option
from recstore_ops.config.row_types import RowTypeName
from recstore_ops.training.models.dcn import CrossStructure
from recstore_ops.training.run.choices import ModelName, TablesName
from recstore_ops.training.run.option_values import (
    Bounds,
    read_bytes,
    read_crosses,
    read_duration,
    read_integers,
    read_names,
    read_negated,
    read_path,
    read_sequences,
    read_turned_off,
)

_MODEL = "Model"

_AT_LEAST_ONE = Bounds(least=1)
_EACH_AT_LEAST_ONE = Bounds(least=1, of_each=True)
_NOT_NEGATIVE = Bounds(least=0)
_ABOVE_ZERO = Bounds(above=0)


def _sizes(text: str, shown: str) -> Option:
    """The option of a perceptron's hidden layers."""
    return Option(text, _MODEL, shown=shown, metavar="N,N,...", type=str, read=read_integers)


@dataclass
class ModelConfig:
    """The model, and which rows its tables keep and how.

    Attributes:
        model: one of `ModelName`.
        dim: columns of the factors (default 8); of all models but lr.
        init_std: standard deviation of the factors' initial values (default 0.01, of two_tower 0.1); of all models but
            lr.
        hidden: sizes of the perceptron's hidden layers (default 64, 32); of all models but lr and fm.
        dropout: the dropout after each hidden layer (default 0); of all models but lr and fm.
        bottom: hidden layers of dlrm's perceptron of dense features (default 64).
        crosses: pairs of fields that wide_deep crosses.
        cross_layers: of dcn, the number of its cross layers (default 2).
        low_rank: of dcn, the rank of the cross layers' matrices; None for full ones.
        cross_structure: of dcn, "stacked" (default) or "parallel".
        sequences: of din, pairs of names of fields, a history and its target; at least one, unless columns have the
            role of a sequence.
        attention_hidden: hidden layers of din's activation units (default 64, 32).
        item_fields: of two_tower, the names of the fields of an item; all others are the query's.
        vector_dim: of two_tower, columns of the vectors of queries and items (default 32).
        temperature: of two_tower, the divisor of products of two vectors (default 0.1).
        popularity_correction: of two_tower, whether its loss corrects scores for the popularity of items in a batch
            (default true).
        bias: whether the model has one; dlrm, dcn, din and two_tower always have.
        table_prefix: how the names of tables begin, `<prefix>/...`; by default as the model is named. Initial rows
            depend on the names.
        tables: "store", or "nn" for `torch.nn.Embedding(sparse=True)` to compare with.
        row_type: the type in which the store keeps rows: "float32", "bfloat16", "float16", "int8" or "float8_e4m3fn".
        admit_after: an id gets a row when so many steps have updated it; None: with the first.
        shared_rows: of each table, the rows that ids share until `admit_after` gives them their own. None: ids have
            their initial values until then.
        ttl: evicts rows that no step has updated for more than so many steps; None evicts none.
        min_norm: evicts rows of a smaller norm; None evicts none.
        capacity: the most rows of each table: each sweep evicts the rows beyond it; None evicts none.
        ttl_time: seconds; evicts rows whose last update came from data rows with an older event time, counted from the
            newest one. `eviction_interval` applies here too.
        eviction_policy: the rows that are evicted first for capacity, "lru" (default) or "lfu".
        eviction_interval: steps between two sweeps that evict rows (default 1000).
        memory_limit: the most bytes of memory that each table of the store may take.
        disk: a directory for the rows beyond the memory limit; without it, a run that exceeds the limit ends with an
            error.
    """

    model: Annotated[
        ModelName,
        Option(
            "Logistic regression, factorization machine, DeepFM, DLRM, Wide & Deep, DCN-V2, DIN; two towers for "
            "retrieval.",
            _MODEL,
        ),
    ] = "fm"
    dim: Annotated[int | None, Option("Columns of an id's factors; not lr.", _MODEL, shown="8"), _AT_LEAST_ONE] = None
    init_std: Annotated[
        float | None,
        Option("Deviation of new rows; not lr.", _MODEL, shown="0.01; 0.1 two_tower"),
        _NOT_NEGATIVE,
    ] = None
    hidden: Annotated[
        tuple[int, ...] | None,
        _sizes("Sizes of hidden layers; not lr, fm.", shown="64,32"),
        _EACH_AT_LEAST_ONE,
    ] = None
    dropout: Annotated[
        float | None, Option("After each hidden layer.", _MODEL, shown="0"), Bounds(least=0, below=1)
    ] = None
    bottom: Annotated[
        tuple[int, ...] | None,
        _sizes("Hidden layers over dlrm's dense features.", shown="64"),
        _EACH_AT_LEAST_ONE,
    ] = None
    crosses: Annotated[
        tuple[tuple[int, int], ...] | None,
        Option(
            "Two fields whose pairs wide_deep weighs; may be repeated.",
            _MODEL,
            name="cross",
            metavar="I,J",
            type=list[str],
            read=read_crosses,
        ),
    ] = None
    cross_layers: Annotated[int | None, Option("Cross layers of dcn.", _MODEL, shown="2"), _AT_LEAST_ONE] = None
    low_rank: Annotated[
        int | None,
        Option("Rank of dcn's cross layers.", _MODEL, shown="full matrices"),
        _AT_LEAST_ONE,
    ] = None
    cross_structure: Annotated[
        CrossStructure | None,
        Option("Position of dcn's perceptron: stacked or parallel.", _MODEL, shown="stacked"),
    ] = None
    sequences: Annotated[
        tuple[tuple[str, str], ...] | None,
        Option(
            "A history of ids, and its target, of din; may be repeated.",
            _MODEL,
            name="sequence",
            metavar="HISTORY=TARGET",
            type=list[str],
            read=read_sequences,
        ),
    ] = None
    attention_hidden: Annotated[
        tuple[int, ...] | None,
        _sizes("Hidden layers of din's activation units.", shown="64,32"),
        _EACH_AT_LEAST_ONE,
    ] = None
    item_fields: Annotated[
        tuple[str, ...] | None,
        Option(
            "A field of two_tower's item; may be repeated.",
            _MODEL,
            name="item-field",
            metavar="NAME",
            type=list[str],
            read=read_names,
        ),
    ] = None
    vector_dim: Annotated[int | None, Option("Columns of two_tower's vectors.", _MODEL, shown="32"), _AT_LEAST_ONE] = (
        None
    )
    temperature: Annotated[
        float | None,
        Option("Temperature: two_tower divides products of vectors by it.", _MODEL, shown="0.1"),
        _ABOVE_ZERO,
    ] = None
    popularity_correction: Annotated[
        bool | None,
        Option(
            "Leave the popularity of items in two_tower's scores uncorrected.",
            _MODEL,
            name="no-popularity-correction",
            type=bool,
            default=False,
            read=read_turned_off,
        ),
    ] = None
    bias: Annotated[
        bool, Option("A model without bias.", _MODEL, name="no-bias", type=bool, default=False, read=read_negated)
    ] = True
    table_prefix: Annotated[
        str | None,
        Option(
            "How the names of tables begin, PREFIX/...",
            _MODEL,
            shown="the model",
        ),
    ] = None
    tables: Annotated[
        TablesName,
        Option(
            "The store, or nn.Embedding(sparse=True).",
            _MODEL,
        ),
    ] = "store"
    row_type: Annotated[
        RowTypeName,
        Option("The type of rows in the store.", _MODEL),
    ] = "float32"
    admit_after: Annotated[
        int | None,
        Option(
            "Updates before an id gets a row.",
            _MODEL,
            shown="1",
            metavar="STEPS",
        ),
        _AT_LEAST_ONE,
    ] = None
    shared_rows: Annotated[
        int | None,
        Option(
            "Rows that ids share, by a hash, before.",
            _MODEL,
            shown="none",
            metavar="ROWS",
        ),
        _AT_LEAST_ONE,
    ] = None
    ttl: Annotated[
        int | None,
        Option("Rows without an update for longer leave.", _MODEL, shown="never", metavar="STEPS"),
        _AT_LEAST_ONE,
    ] = None
    ttl_time: Annotated[
        float | None,
        Option(
            "The same by event times, from a column of the role time: 7d, 12h, 30m, 90s.",
            _MODEL,
            shown="never",
            metavar="AGE",
            type=str,
            read=read_duration,
        ),
        _ABOVE_ZERO,
    ] = None
    min_norm: Annotated[float | None, Option("Rows of a smaller L2 norm leave.", _MODEL, shown="none"), _ABOVE_ZERO] = (
        None
    )
    capacity: Annotated[
        int | None,
        Option(
            "Rows of a table after each sweep.",
            _MODEL,
            shown="none",
            metavar="ROWS",
        ),
        _AT_LEAST_ONE,
    ] = None
    eviction_policy: Annotated[
        Literal["lru", "lfu"] | None,
        Option("Rule by which rows are evicted for --capacity.", _MODEL, shown="lru"),
    ] = None
    eviction_interval: Annotated[
        int | None,
        Option("Between two sweeps for rows that leave.", _MODEL, shown="1000", metavar="STEPS"),
        _AT_LEAST_ONE,
    ] = None
    memory_limit: Annotated[
        int | None,
        Option(
            "The most memory of each table, as 4GB or 512MiB.",
            _MODEL,
            type=str,
            read=read_bytes,
        ),
        _AT_LEAST_ONE,
    ] = None
    disk: Annotated[
        str | None,
        Option("A directory for rows beyond --memory-limit.", _MODEL, type=Path, read=read_path),
    ] = None
