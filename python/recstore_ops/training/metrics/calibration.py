"""Whether predicted probabilities are right: of the rows predicted at 3 %, are 3 % positive?"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from recstore_ops.training.metrics.evaluation import Scores

_Z_95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class CalibrationBins:
    """Rows binned by predicted probability, in ascending order.

    Attributes:
        rows: int64 [K], of each bin.
        predicted: float64 [K], mean predicted probability.
        observed: float64 [K], share of positives.
        low, high: float64 [K], 95 % interval of `observed`.
    """

    rows: NDArray[np.int64]
    predicted: NDArray[np.float64]
    observed: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def expected_calibration_error(self) -> float:
        """Returns the mean over rows of |observed - predicted| of their bin.

        Source: Naeini et al. 2015, Obtaining Well Calibrated Probabilities Using Bayesian Binning, with bins of equal
        numbers of rows in place of equal width: click probabilities crowd near zero.
        """
        return float(np.average(np.abs(self.observed - self.predicted), weights=self.rows))


def calibration_bins(scores: Scores, bins: int = 20) -> CalibrationBins:
    """Bins rows by predicted probability into at most `bins` bins of equal numbers of rows.

    Equal predictions are never split, because any split would be arbitrary: they all go to the bin of the middle one.
    So if many predictions are equal, there are fewer bins, of unequal sizes.

    Raises:
        ValueError: there are no rows.
    """
    if len(scores) == 0:
        raise ValueError("no rows to bin")
    predictions, prediction_of_row, counts = np.unique(
        scores.probabilities().numpy(), return_inverse=True, return_counts=True
    )
    bin_of_prediction = (2 * counts.cumsum() - counts) * bins // (2 * len(scores))
    _, bin_of_prediction = np.unique(bin_of_prediction, return_inverse=True)  # without the empty ones
    rows = np.bincount(bin_of_prediction, weights=counts).astype(np.int64)
    positives = np.bincount(bin_of_prediction[prediction_of_row], weights=scores.labels.numpy()).astype(np.int64)
    low, high = wilson_interval(positives, rows)
    return CalibrationBins(
        rows=rows,
        predicted=np.bincount(bin_of_prediction, weights=counts * predictions) / rows,
        observed=positives / rows,
        low=low,
        high=high,
    )


def wilson_interval(
    positives: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the 95 % interval of the probability behind `positives` of `rows`, [K] each and at least one row.

    Source: Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference.
    """
    share, z2 = positives / rows, _Z_95**2
    center = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    half = _Z_95 * np.sqrt(share * (1 - share) / rows + z2 / (4 * rows**2)) / (1 + z2 / rows)
    # In exact arithmetic the interval holds the share; rounding may leave it out where that is 0 or 1.
    return np.minimum(np.maximum(center - half, 0), share), np.maximum(np.minimum(center + half, 1), share)
