"""Lookups that were begun ahead of their batch, and wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from recstore_ops.sharding.exchange import Layout, Status, exchange_messages, raise_if_failed
from recstore_ops.sharding.lookup import Lookup
from recstore_ops.table.shard import Shard

# Brings rows that were sent ahead of their batch up to date: owners send those again that changed since.
#
# An owner keeps what it sent, reads the same rows again when the batch has come, and compares. So whatever changed a
# row meanwhile is seen: a step, a write, an eviction or a load.
#
# Shape suffixes: C rows that changed, D dim, W ranks, R runs of rows of one dim.

_PLACE = torch.int32


def refresh(lookup: Lookup, shard: Shard, *, is_wanted: bool) -> bool:
    """Gives a lookup that was begun ahead the rows as they are now, if all ranks want it; returns whether they do.

    All ranks call it together.

    Args:
        lookup: whose exchange then goes on over the group of `shard`.
        shard: of its tables.
        is_wanted: whether this rank has a use for it.

    Raises:
        RuntimeError: another rank failed.
    """
    exchange, before = lookup.exchange, lookup.served
    assert before is not None, "a lookup that waits keeps what was sent"
    kind = ("refresh", lookup.kind)
    try:
        now = lookup.read() if is_wanted else before
    except Exception:
        _tell(shard, kind, Status.FAILED, exchange.served_layout)
        raise
    if not is_wanted:
        statuses = _tell(shard, kind, Status.UNWANTED, exchange.served_layout)
        raise_if_failed(statuses, "reading rows")
        return False
    changed, parts = _changed(before, now, exchange.served_layout, shard.wire_dtype)
    words = [[Status.FINE, *(places.numel() for places in runs)] for runs in changed]
    came = exchange_messages(shard, kind, words, parts, "row_bytes")
    statuses = [words[0] for words in came.words]
    raise_if_failed(statuses, "reading rows")
    if Status.UNWANTED in statuses:
        lookup.served = before  # The others still have those rows.
        return False
    for runs, words, body in zip(exchange.asked_layout.runs(lookup.received), came.words, came.bodies, strict=True):
        _overwrite(runs, words[1:], body, shard.wire_dtype)
    exchange.go_on_over(shard)
    return True


def _tell(shard: Shard, kind: object, status: Status, layout: Layout) -> list[int]:
    """Sends the status of this rank to the others, and returns the status of each."""
    none = torch.empty(0, dtype=torch.uint8, device="cpu")
    words = [[status, *([0] * len(runs))] for runs in layout.runs_WR]
    came = exchange_messages(shard, kind, words, [none] * shard.world, "row_bytes")
    return [words[0] for words in came.words]


def _changed(
    before: Tensor, now: Tensor, layout: Layout, wire_dtype: torch.dtype
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The places of rows that differ in each run, int64 `[C]`, by rank; and what is sent of them to each rank."""
    places_WR, parts_W = [], []
    for old_R, new_R in zip(layout.runs(before), layout.runs(now), strict=True):
        places_R = [
            # By bits: a NaN equals itself, and a zero that changed its sign counts as changed.
            (old.view(torch.int32) != new.view(torch.int32)).any(dim=1).nonzero().flatten()
            for old, new in zip(old_R, new_R, strict=True)
        ]
        rows_R = [new.index_select(0, places).to(wire_dtype) for new, places in zip(new_R, places_R, strict=True)]
        parts_W.append(_padded([part for pair in zip(places_R, rows_R, strict=True) for part in pair]))
        places_WR.append(places_R)
    return places_WR, parts_W


def _padded(parts: list[Tensor]) -> Tensor:
    """The bytes of parts, int64 as int32, one after the other, and as many more as make whole words of eight."""
    as_bytes = [_bytes(part.to(_PLACE) if part.dtype == torch.int64 else part) for part in parts]
    more = -sum(part.numel() for part in as_bytes) % 8
    return torch.cat([*as_bytes, torch.zeros(more, dtype=torch.uint8, device="cpu")])


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _overwrite(runs: list[Tensor], counts_R: list[int], body: Tensor, wire_dtype: torch.dtype) -> None:
    """Puts rows that came from one rank in their places."""
    at = 0
    for rows, count in zip(runs, counts_R, strict=True):
        sizes = count * _PLACE.itemsize, count * rows.shape[1] * wire_dtype.itemsize
        # Clones begin at an aligned address, which a view of bytes as another type needs.
        places_C, rows_CD = (part.clone() for part in body[at : at + sum(sizes)].split(sizes))
        rows[places_C.view(_PLACE).long()] = rows_CD.view(wire_dtype).view(count, rows.shape[1]).to(torch.float32)
        at += sum(sizes)


LookupKey = tuple[tuple[int, Tensor], ...]
"""The key of a lookup: the number of each table and the ids asked of it, in order."""


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
        """Whether it asks the same tables, in the same order, which is then so on all ranks."""
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
            # `exception()` waits without raising: the batch that this lookup was for never came.
            pending.lookup.exception()


def take_pending(key: LookupKey, shard: Shard) -> Lookup | None:
    """The lookup begun for this batch, its rows as they are now; `None` if not all ranks have begun theirs.

    All ranks call it together. If lookups in these tables are pending, they are pending on all ranks.

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
