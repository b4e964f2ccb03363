"""Ids hashed into a fixed number of buckets, for models whose tables have a fixed size."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.ops.integers import as_int64
from recstore_ops.training.rows.row_source import MappedRows, RowSource


class HashedRows(MappedRows):
    """The rows of a source with each id replaced by its bucket, `hash_ids(id, buckets)`.

    Raises:
        TypeError: `buckets` is no integer.
        ValueError: it is below one, or no int64.
    """

    def __init__(self, source: RowSource, buckets: int) -> None:
        buckets = as_int64("HashedRows", "buckets", buckets)
        if buckets < 1:
            raise ValueError(f"expected at least 1 bucket, got {buckets}")
        super().__init__(source, partial(hash_ids, buckets=buckets))
        self.unhashed = source


def hash_ids(ids: Tensor, buckets: int) -> Tensor:
    """Returns splitmix64(id) modulo `buckets` for each id, int64 [N], as unsigned numbers: int64 [N]."""
    return operators.bucket_ids(ids, buckets)
