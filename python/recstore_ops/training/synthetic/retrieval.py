"""Planted pairs of a query and an item that was chosen for it, by the item's popularity and how the two fit.

A row has a query, drawn uniformly, and one item, and every row is positive. With factors u of the query and v of the
item, both normal with K columns,

    p(item | query) proportional to popularity(item) exp(strength <u, v> / sqrt(K))
    popularity of item i proportional to 1 / (i + 5)

so a few items are chosen for most queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.query_items import QueryItemSplit
from recstore_ops.training.metrics.evaluation import Evaluation
from recstore_ops.training.metrics.retrieval import Candidates, RankedPart, evaluate_retrieval
from recstore_ops.training.synthetic.planted import row_counts

FIELD_NAMES = ("query", "item")
QUERIES, ITEMS = 400, 200
SIDES = QueryItemSplit(num_fields=len(FIELD_NAMES), items=(1,))
_COLUMNS, _STRENGTH, _FLATTENED = 4, 2.0, 5
_TRAIN_ROWS, _TEST_ROWS = 40_000, 4_000


@dataclass(frozen=True)
class PlantedRetrieval:
    """Train and test rows of the fields `query` and `item`, and the true probabilities.

    Queries are the ids from 0, items those from `QUERIES`.

    Attributes:
        log_popularity_I: float64 [ITEMS], of each item before any query is known, their exponentials summing to 1.
        log_p_QI: float64 [QUERIES, ITEMS], log p(item | query).
    """

    train: Batch
    test: Batch
    log_popularity_I: NDArray[np.float64]
    log_p_QI: NDArray[np.float64]

    def bayes(self) -> Evaluation:
        """Returns the figures of the true probabilities on the test rows, the best of any model in expectation.

        Candidates are the items of the training and test rows, as in a run.
        """
        return self.evaluated(self.log_p_QI)

    def by_popularity(self) -> Evaluation:
        """Returns the figures of the items' shares among all choices, the same for every query."""
        shares_I = np.exp(self.log_p_QI).mean(0)
        return self.evaluated(np.broadcast_to(np.log(shares_I), self.log_p_QI.shape))

    def evaluated(self, scores_QI: NDArray[np.float64]) -> Evaluation:
        """Returns the figures of any scores, [QUERIES, ITEMS], on the test rows."""
        candidates = Candidates(SIDES, ([self.train], [self.test]))
        return evaluate_retrieval(_Scores(scores_QI), candidates, RankedPart.of(SIDES, [self.test], candidates))


def planted_retrieval(seed: int = 0, train_rows: int | None = None, test_rows: int | None = None) -> PlantedRetrieval:
    """Draws a data set; equal arguments give equal rows.

    Args:
        seed: of the true model and the rows.
        train_rows, test_rows: how many; None takes 40,000 and 4,000.

    Raises:
        ValueError: a row count below one.
    """
    train_rows, test_rows = row_counts(train_rows, test_rows, (_TRAIN_ROWS, _TEST_ROWS))
    rng = np.random.default_rng(seed)
    u_QK, v_IK = rng.standard_normal((QUERIES, _COLUMNS)), rng.standard_normal((ITEMS, _COLUMNS))
    log_popularity_I = _log_softmax(-np.log(np.arange(ITEMS) + _FLATTENED))
    log_p_QI = _log_softmax(log_popularity_I + _STRENGTH / np.sqrt(_COLUMNS) * u_QK @ v_IK.T)
    train, test = (_draw_rows(rng, np.exp(log_p_QI), rows) for rows in (train_rows, test_rows))
    return PlantedRetrieval(train, test, log_popularity_I, log_p_QI)


def _draw_rows(rng: np.random.Generator, p_QI: NDArray[np.float64], num_rows: int) -> Batch:
    query_B = rng.integers(QUERIES, size=num_rows)
    up_to_QI = p_QI.cumsum(1)
    item_B = (up_to_QI[query_B] < rng.random((num_rows, 1)) * up_to_QI[query_B, -1:]).sum(1)
    return Batch(
        ids=torch.from_numpy(np.stack([query_B, QUERIES + item_B], axis=1).reshape(-1)),
        labels=torch.ones(num_rows, dtype=torch.float32, device="cpu"),
        num_fields=len(FIELD_NAMES),
    )


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class _Scores:
    """Given scores as products of vectors: a query's are its scores, an item's has a single 1."""

    sides = SIDES
    temperature = 1.0

    def __init__(self, scores_QI: NDArray[np.float64]) -> None:
        self._scores_QI = torch.from_numpy(np.ascontiguousarray(scores_QI))

    def query_vectors(self, batch: Batch) -> Tensor:
        return self._scores_QI[SIDES.query(batch).ids]

    def item_vectors(self, batch: Batch) -> Tensor:
        return torch.eye(ITEMS, dtype=torch.float64, device="cpu")[SIDES.item(batch).ids - QUERIES]
