"""The MovieLens ratings: user, movie, rating and time, in the three ways that its releases separate them.

A rating of `threshold` or more is the label 1. The time must be an integer and is not used.
"""

from __future__ import annotations

from typing import Literal

from recstore_ops.training.formats.columns import Column, ColumnKind
from recstore_ops.training.formats.delimited import DelimitedFormat

DEFAULT_THRESHOLD = 4.0

_COLUMNS = (
    Column("user", ColumnKind.KEY, title="userId"),
    Column("movie", ColumnKind.KEY, title="movieId"),
    Column("rating", ColumnKind.RATING),
    Column("timestamp", ColumnKind.TIMESTAMP),
)
RATINGS_HEADER = [(column.title or column.name).encode() for column in _COLUMNS]
"""The cells of the header of `ratings.csv`."""

MovieLensKind = Literal["ratings.csv", "ratings.dat", "u.data"]

_SEPARATORS: dict[MovieLensKind, bytes] = {"ratings.csv": b",", "ratings.dat": b"::", "u.data": b"\t"}


def movielens_format(kind: MovieLensKind, threshold: float = DEFAULT_THRESHOLD) -> DelimitedFormat:
    """Returns the format of the files of that name; only `ratings.csv` may have a header."""
    return DelimitedFormat(
        "movielens",
        _COLUMNS,
        separator=_SEPARATORS[kind],
        has_header=kind == "ratings.csv",
        threshold=threshold,
    )
