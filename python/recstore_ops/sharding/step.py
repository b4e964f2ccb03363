"""A step in sharded tables: all ranks take theirs, or none does."""

from __future__ import annotations

from collections.abc import Sequence

from recstore_ops.sharding.exchange import of_other_rank
from recstore_ops.sharding.lookup import shard_of_tables
from recstore_ops.table.table import Table


def compare_ranks(tables: Sequence[Table]) -> None:
    """Asks the other ranks, before a step in sharded tables, whether they have gradients that are not finite.

    All ranks call it together. They ask only if flags of the exchanges leave it open: gradients that are not finite
    came to some rank, or were lent to be changed, or come by `HashTable.accept_grad`. On a rank that has such
    gradients it returns: its own step reports the error.

    Raises:
        RuntimeError: another rank has such gradients, and will refuse its step.
    """
    tables = [table for table in tables if table.needs_comparing]
    if not tables:
        return
    is_refusing = not all(table.has_finite_gradients() for table in tables)
    ranks = shard_of_tables(tables).ranks_where(is_refusing)
    if ranks and not is_refusing:
        raise of_other_rank(
            f"rank {ranks[0]} refuses the step, for gradients that are not finite; its own error tells which. "
            "No table has changed on any rank"
        )
    if not ranks:
        for table in tables:
            table.note_compared()
