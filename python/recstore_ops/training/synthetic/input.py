"""Planted rows of any kind by its name, as a run takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.row_source import numbered_names
from recstore_ops.training.synthetic import retrieval
from recstore_ops.training.synthetic.planted import PlantedKind, PlantedRows, planted_rows
from recstore_ops.training.synthetic.sequences import FIELD_NAMES, PlantedSequences, planted_sequences

PlantedName = Literal["pairs", "triples", "sequences", "retrieval"]


@dataclass(frozen=True)
class PlantedInput:
    """Train and test rows, and the names of their fields.

    Attributes:
        theory: says in one sentence what is known of the test rows, which may take a second to compute.
    """

    train: Batch
    test: Batch
    field_names: tuple[str, ...]
    theory: Callable[[], str]


def planted_input(name: PlantedName, seed: int, train_rows: int | None, test_rows: int | None) -> PlantedInput:
    """Draws a data set; equal arguments give equal rows.

    Args:
        name: of the kind.
        seed: of the true model and the rows.
        train_rows, test_rows: how many; None takes the kind's own.

    Raises:
        ValueError: an unknown kind, or a row count below one.
    """
    if name == "sequences":
        planted = planted_sequences(seed, train_rows, test_rows)
        return PlantedInput(planted.train, planted.test, FIELD_NAMES, partial(_note_on_sequences, planted))
    if name == "retrieval":
        pairs = retrieval.planted_retrieval(seed, train_rows, test_rows)
        return PlantedInput(pairs.train, pairs.test, retrieval.FIELD_NAMES, partial(_note_on_retrieval, pairs))
    rows = planted_rows(cast(PlantedKind, name), seed, train_rows, test_rows)
    return PlantedInput(rows.train, rows.test, numbered_names("field", rows.test.num_fields), partial(_note, rows))


def _note(planted: PlantedRows) -> str:
    return (
        f"test AUC and logloss of the true model: {planted.bayes_auc:.4f}, {planted.bayes_logloss:.4f}; of the best "
        f"without interactions: {planted.additive_auc:.4f}, {planted.additive_logloss:.4f}; with pairs only: "
        f"{planted.pairwise_auc:.4f}, {planted.pairwise_logloss:.4f}"
    )


def _note_on_sequences(planted: PlantedSequences) -> str:
    return (
        f"test AUC and logloss of the true model: {planted.bayes_auc:.4f}, {planted.bayes_logloss:.4f}; AUC of the "
        f"best reading of 5 sums over a history: {planted.pooled_auc(5):.4f}, of 9: {planted.pooled_auc(9):.4f}"
    )


def _note_on_retrieval(planted: retrieval.PlantedRetrieval) -> str:
    best, popular = planted.bayes(), planted.by_popularity()
    return (
        f"test recall@10, NDCG@10 and logloss of the true model: {best.recall:.4f}, {best.ndcg:.4f}, "
        f"{best.logloss:.4f}; of ranking by popularity alone: {popular.recall:.4f}, {popular.ndcg:.4f}, "
        f"{popular.logloss:.4f}"
    )
