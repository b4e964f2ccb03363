"""Whether tensors hold finite values only."""

from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    A sum shows it for a fraction of what looking at each value takes. Finite values may add up to more than their type
    holds: only a finite sum says anything.
    """
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
