"""How many rows are drawn."""

from __future__ import annotations


def row_counts(train_rows: int | None, test_rows: int | None, defaults: tuple[int, int]) -> tuple[int, int]:
    """Returns the numbers of training and test rows, the defaults where None is given.

    Raises:
        ValueError: one is below one.
    """
    train = defaults[0] if train_rows is None else train_rows
    test = defaults[1] if test_rows is None else test_rows
    if train < 1 or test < 1:
        raise ValueError(f"expected at least one row each, got {train} and {test}")
    return train, test
