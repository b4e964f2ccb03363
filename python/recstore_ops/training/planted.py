"""Generated rows with planted interactions, which only a correct factorization machine finds.

Every row has one id of each field, drawn uniformly, and a label drawn with the log-odds

    logit = -1 + sum_i w_i + 1/2 (|sum_i v_i|^2 - sum_i |v_i|^2)

where w_i ~ 0.3 N(0, 1) and v_i ~ 0.45 N(0, 1) in each of its 4 columns. A linear model sees little
of it; an FM with 4 or more columns can come near the Bayes AUC, the AUC of the true logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recstore_ops.training.batch import Batch
from recstore_ops.training.metrics import auc, logloss

NUM_FIELDS = 8
IDS_PER_FIELD = 50
RANK = 4


@dataclass(frozen=True)
class PlantedRows:
    """Train and test rows, and the figures of the true model on the test rows (logloss in nats)."""

    train: Batch
    test: Batch
    bayes_auc: float
    bayes_logloss: float


def planted_interactions(seed: int = 0, train_rows: int = 40_000, test_rows: int = 10_000) -> PlantedRows:
    """Draws the data set; equal arguments give equal rows.

    Raises:
        ValueError: a row count below one.
    """
    if train_rows < 1 or test_rows < 1:
        raise ValueError(f"expected at least one row each, got {train_rows} and {test_rows}")
    rng = np.random.default_rng(seed)
    num_ids = NUM_FIELDS * IDS_PER_FIELD
    w = 0.3 * rng.standard_normal(num_ids)
    v = 0.45 * rng.standard_normal((num_ids, RANK))
    train, _ = _draw_rows(rng, w, v, train_rows)
    test, logits = _draw_rows(rng, w, v, test_rows)
    return PlantedRows(train, test, auc(test.labels, logits), logloss(test.labels, logits))


def _draw_rows(rng: np.random.Generator, w: NDArray, v: NDArray, num_rows: int) -> tuple[Batch, NDArray]:
    ids_BF = rng.integers(IDS_PER_FIELD, size=(num_rows, NUM_FIELDS))
    ids_BF += IDS_PER_FIELD * np.arange(NUM_FIELDS)
    rows_BFD = v[ids_BF]
    pairs_B = 0.5 * (rows_BFD.sum(1) ** 2 - (rows_BFD**2).sum(1)).sum(1)
    logits_B = -1 + w[ids_BF].sum(1) + pairs_B
    labels_B = rng.random(num_rows) < 1 / (1 + np.exp(-logits_B))
    batch = Batch(
        ids=torch.from_numpy(ids_BF.reshape(-1)),
        values=torch.ones(ids_BF.size),
        offsets=torch.arange(num_rows + 1) * NUM_FIELDS,
        labels=torch.from_numpy(labels_B.astype(np.float32)),
    )
    return batch, logits_B
