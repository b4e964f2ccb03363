"""Finds the ids of a batch: what loaders hand to modules."""

from typing import Any


def find_features(batch: Any) -> Any:
    """Finds the `KeyedJaggedTensor` of a batch.

    Raises:
        ValueError: there is none, or more than one; give `features` to say which.
    """
    if hasattr(batch, "length_per_key"):
        return batch
    if hasattr(batch, "sparse_features"):
        return batch.sparse_features
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    found = [value for value in values if hasattr(value, "length_per_key")]
    if len(found) != 1:
        raise ValueError(
            f"expected one KeyedJaggedTensor in a batch of type {type(batch).__name__}, found {len(found)}; "
            "say with features= which it is"
        )
    return found[0]
