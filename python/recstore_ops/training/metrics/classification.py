"""The two figures of click prediction: AUC (ranking) and logloss (calibrated probabilities).

Both take labels 0/1 and raw scores (logits) of the same shape [B], as arrays or CPU tensors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns P(score of a positive > score of a negative), ties counted half.

    This is the area under the ROC curve. Exact: pairs are counted in integers, and only the last
    step divides.

    Raises:
        ValueError: only one class is present, so that there is no pair to rank; or the labels are
            not 0 and 1, the scores not finite, the shapes not equal.

    Source: Hanley and McNeil 1982, the Mann-Whitney statistic.
    """
    positive, scores = _checked(labels, scores)
    num_positive = int(positive.sum())
    num_negative = positive.size - num_positive
    if num_positive == 0 or num_negative == 0:
        raise ValueError(
            f"AUC needs labels of both classes, got {num_positive} positive and {num_negative} negative ones"
        )
    distinct, group = np.unique(scores, return_inverse=True)
    positives = np.bincount(group[positive], minlength=distinct.size)
    negatives = np.bincount(group[~positive], minlength=distinct.size)
    negatives_below = np.cumsum(negatives) - negatives
    twice_won = int((positives * (2 * negatives_below + negatives)).sum())
    return twice_won / (2 * num_positive * num_negative)


def logloss(labels: ArrayLike, logits: ArrayLike) -> float:
    """Returns the mean negative log-likelihood in nats; one class alone is fine.

    Computed as `max(z, 0) - z * y + log(1 + exp(-|z|))`, which neither overflows nor takes log(0).

    Raises:
        ValueError: there are no rows, or the input is refused as by `auc`.
    """
    return float(row_losses(labels, logits).mean())


def row_losses(labels: ArrayLike, logits: ArrayLike) -> NDArray[np.float64]:
    """Returns each row's negative log-likelihood in nats, [B]; `logloss` is the mean of these.

    Raises:
        ValueError: as `logloss`.
    """
    positive, logits = _checked(labels, logits)
    # No exponential of a positive number, which would overflow for a large logit.
    return np.maximum(logits, 0) - logits * positive + np.log1p(np.exp(-np.abs(logits)))


def _checked(labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray, NDArray]:
    labels, scores = np.asarray(labels), np.asarray(scores, dtype=np.float64)
    if labels.ndim != 1 or labels.shape != scores.shape:
        raise ValueError(f"expected two equal 1-D shapes, got {labels.shape} and {scores.shape}")
    if labels.size == 0:
        raise ValueError("expected at least one row, got none")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError("expected labels 0 and 1 only")
    if not np.isfinite(scores).all():
        raise ValueError(f"score {int(np.argmin(np.isfinite(scores)))} is not finite")
    return labels == 1, scores
