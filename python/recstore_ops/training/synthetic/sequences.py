"""Planted histories: what a history says of a target is in the few of its items that resemble the target.

Items belong to C clusters of equal size. A row has a history of items, of any length up to a bound, and one target, all
drawn uniformly. With n_c the history's items of cluster c, and c(t) the target's cluster,

    logit = -0.5 + 3 (n_c(t) - L / C)        L the length of the history

so that an attention that is 1 between items of one cluster and 0 between others gives the logit. The mean log-odds is
-0.5 for every history and for every target.

A model that pools a history before it sees the target knows K sums of numbers over the history's items.
`pooled_auc(K)` is how well scores can rank that are linear in these sums, with other coefficients for each target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.metrics.classification import auc, logloss
from recstore_ops.training.synthetic.planted import row_counts

FIELD_NAMES = ("history", "target")
CLUSTERS = 12
ITEMS_PER_CLUSTER = 4
MAX_HISTORY = 16
_BIAS, _STRENGTH = -0.5, 3.0
_TRAIN_ROWS, _TEST_ROWS = 20_000, 10_000


@dataclass(frozen=True)
class PlantedSequences:
    """Train and test rows of the fields `history` and `target`, and the best possible figures for the test rows.

    Items are the ids from 0; item i belongs to cluster `i % CLUSTERS`. Histories and targets share them.

    Attributes:
        bayes_auc, bayes_logloss: of the true logits, the best of any model; logloss in nats.
    """

    train: Batch
    test: Batch
    bayes_auc: float
    bayes_logloss: float

    def pooled_auc(self, sums: int) -> float:
        """Returns the AUC of the best scores that are linear in so many sums over the history's items.

        The sums are spread evenly over the clusters, which ranks as the linear scores of lowest logloss do, within
        0.01. Some uneven sums rank up to 0.011 better. This is at best the limit of factorization machines. A network
        could decode more from the sums, because counts are whole numbers; docs/planted.md has what small ones reach.

        Args:
            sums: K. A model that pools factors of D columns has D, or D + 1 with a weight an item beside them.

        Raises:
            ValueError: K is below one, or so large that K sums give the logit itself.
        """
        if not 1 <= sums < CLUSTERS - 1:
            raise ValueError(f"expected from 1 to {CLUSTERS - 2} sums, got {sums}")
        return auc(self.test.labels, _pooled_scores(self.test, sums))


def planted_sequences(seed: int = 0, train_rows: int | None = None, test_rows: int | None = None) -> PlantedSequences:
    """Draws a data set; equal arguments give equal rows.

    Args:
        seed: of the rows.
        train_rows, test_rows: how many; None takes 20,000 and 10,000.

    Raises:
        ValueError: a row count below one.
    """
    train_rows, test_rows = row_counts(train_rows, test_rows, (_TRAIN_ROWS, _TEST_ROWS))
    rng = np.random.default_rng(seed)
    train, test = _draw_rows(rng, train_rows), _draw_rows(rng, test_rows)
    logits = true_logits(test)
    return PlantedSequences(train, test, auc(test.labels, logits), logloss(test.labels, logits))


def true_logits(batch: Batch) -> NDArray[np.float64]:
    """Returns the true logits [B] of rows of planted sequences."""
    centred_BC, target_B = _centred_counts(batch)
    return _BIAS + _STRENGTH * centred_BC[np.arange(len(batch)), target_B]


def _draw_rows(rng: np.random.Generator, num_rows: int) -> Batch:
    items = CLUSTERS * ITEMS_PER_CLUSTER
    lengths_B = rng.integers(MAX_HISTORY + 1, size=num_rows)
    offsets = np.concatenate([[0], np.stack([lengths_B, np.ones_like(lengths_B)], axis=1).reshape(-1).cumsum()])
    batch = Batch(
        ids=torch.from_numpy(rng.integers(items, size=offsets[-1])),
        labels=torch.zeros(num_rows, dtype=torch.float32, device="cpu"),
        num_fields=len(FIELD_NAMES),
        offsets=torch.from_numpy(offsets),
    )
    labels_B = rng.random(num_rows) < 1 / (1 + np.exp(-true_logits(batch)))
    batch.labels.copy_(torch.from_numpy(labels_B))
    return batch


def _centred_counts(batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """n_c - L / C of each row, [B, C], and the cluster of its target, [B]."""
    offsets = batch.offsets_or_ones().numpy()
    clusters_N, lengths_B = batch.ids.numpy() % CLUSTERS, np.diff(offsets)[::2]
    is_target = np.zeros(len(clusters_N), dtype=bool)
    is_target[offsets[1::2]] = True
    cells = np.repeat(np.arange(len(batch)), lengths_B) * CLUSTERS + clusters_N[~is_target]
    counts_BC = np.bincount(cells, minlength=len(batch) * CLUSTERS).reshape(-1, CLUSTERS)
    return counts_BC - lengths_B[:, None] / CLUSTERS, clusters_N[is_target]


def _pooled_scores(batch: Batch, sums: int) -> NDArray[np.float64]:
    """The scores [B] of K sums that are spread evenly over the clusters.

    K sums over the items are K directions of the counts n. Given the length, the counts of all clusters have equal
    variances and equal covariances. So the best linear estimate of n_c - L / C is its projection onto the K
    directions, and the clusters' explained shares of variance sum to K, however the directions lie. These ones are
    columns of the Fourier basis, orthogonal to the length, so that all shares are K / C.
    """
    centred_BC, target_B = _centred_counts(batch)
    return (centred_BC @ _even_projection(sums))[np.arange(len(batch)), target_B]


def _even_projection(rank: int) -> NDArray[np.float64]:
    """A projection [C, C] of a rank below C with equal elements on its diagonal, orthogonal to the constant vector."""
    angles_C = 2 * np.pi * np.arange(CLUSTERS) / CLUSTERS
    waves = range(1, rank // 2 + 1)
    columns = [np.sqrt(2) * wave(k * angles_C) for k in waves for wave in (np.cos, np.sin)]
    if rank % 2:
        columns.append(np.cos(CLUSTERS // 2 * angles_C))
    basis_CK = np.stack(columns, axis=1) / np.sqrt(CLUSTERS)
    return basis_CK @ basis_CK.T
