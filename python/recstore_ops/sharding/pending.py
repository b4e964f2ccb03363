"""Lookups that were begun ahead of their batch, and wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from recstore_ops.sharding.lookup import Lookup
from recstore_ops.sharding.refresh import refresh
from recstore_ops.table.shard import Shard

LookupKey = tuple[tuple[int, Tensor], ...]
"""What tells a lookup: the number of each table and the ids asked of it, in order."""


@dataclass(eq=False)
class PendingLookup:
    """A lookup under way.

    Attributes:
        key: of the batch that it is for.
        lookup: with its rows, once they have come.
    """

    key: LookupKey
    lookup: Future[Lookup]

    def is_of_tables(self, key: LookupKey) -> bool:
        """Whether it asks the same tables, in the same order; it then does so on all ranks."""
        return [table for table, _ in self.key] == [table for table, _ in key]

    def is_for(self, key: LookupKey) -> bool:
        """Whether it is for the same tables and ids."""
        return all(torch.equal(own, other) for (_, own), (_, other) in zip(self.key, key, strict=True))


_pending: list[PendingLookup] = []


def add_pending(pending: PendingLookup) -> None:
    """Lets the lookup of the same tables and ids take it."""
    _pending.append(pending)


def drop_pending(dropped: Sequence[PendingLookup]) -> None:
    """Forgets lookups that were not taken; waits for those under way, which other ranks wait for too."""
    for pending in dropped:
        if pending in _pending:
            _pending.remove(pending)
            pending.lookup.exception()


def take_pending(key: LookupKey, shard: Shard) -> Lookup | None:
    """The lookup begun for this batch, its rows as they are now; `None` if not all ranks have begun theirs.

    All ranks call it together. Where lookups in these tables are pending, they are so on all ranks alike.

    Raises:
        RuntimeError: another rank failed; further as `sharded_rows`.
    """
    for pending in [each for each in _pending if each.is_of_tables(key)]:
        # An error of the exchange came to all ranks.
        lookup = pending.lookup.result()
        if refresh(lookup, shard, is_wanted=pending.is_for(key)):
            _pending.remove(pending)
            return lookup
    return None
