"""Brings rows that were sent ahead of their batch up to date: owners send those again that changed since.

An owner keeps what it sent, reads the same rows again when the batch has come, and compares. So whatever changed a row
meanwhile is seen: a step, a write, an eviction or a load.

Shape suffixes: U distinct ids, C rows that changed, W ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recstore_ops.sharding.exchange import Status, exchange_counts, move, raise_if_failed
from recstore_ops.sharding.lookup import Lookup
from recstore_ops.table.shard import Shard

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
    exchange = lookup.exchange
    before, tables = lookup.served, len(lookup.served)
    try:
        now = lookup.read() if is_wanted else before
    except Exception:
        exchange_counts(shard, [[0] * tables] * shard.world, Status.FAILED)
        raise
    asked = [exchange.asked_by_each(table) for table in range(tables)]
    changed = [_changed(old, new, counts) for old, new, counts in zip(before, now, asked, strict=True)]
    sent_WT = [[int(places[rank].numel()) for places in changed] for rank in range(shard.world)]
    received_WT, statuses = exchange_counts(shard, sent_WT, Status.FINE if is_wanted else Status.UNWANTED)
    raise_if_failed(statuses, "reading rows")
    if Status.UNWANTED in statuses:
        return False
    parts = [_packed(rows, places, counts, shard) for rows, places, counts in zip(now, changed, asked, strict=True)]
    received = move(shard, parts, sent_WT, received_WT, "row_bytes")
    for table, packed in enumerate(received):
        counts = [each[table] for each in received_WT]
        _overwrite(lookup.rows[table], packed, counts, exchange.asked[table].counts, shard)
    exchange.go_on_over(shard)
    return True


def _changed(before_UD: Tensor, now_UD: Tensor, counts_W: list[int]) -> tuple[Tensor, ...]:
    """The places of rows that differ among those for each rank, int64 `[C]` each."""
    is_changed_U = (before_UD.view(torch.int32) != now_UD.view(torch.int32)).any(dim=1)
    return tuple(part.nonzero().flatten() for part in is_changed_U.split(counts_W))


def _packed(now_UD: Tensor, places: tuple[Tensor, ...], counts_W: list[int], shard: Shard) -> Tensor:
    """The rows at some places with these places before them, as bytes, `[C, width]`."""
    rows = [part[each] for part, each in zip(now_UD.split(counts_W), places, strict=True)]
    rows_CD = torch.cat(rows).to(shard.wire_dtype)
    places_C = torch.cat(places).to(_PLACE)
    return torch.cat([_bytes(places_C.unsqueeze(1)), _bytes(rows_CD)], dim=1)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _overwrite(rows_UD: Tensor, packed: Tensor, received_W: list[int], asked_W: list[int], shard: Shard) -> None:
    """Puts the rows received from each rank in their places among those asked of it."""
    places, rows_CD = packed.split([_PLACE.itemsize, packed.shape[1] - _PLACE.itemsize], dim=1)
    starts_W = torch.tensor([0, *asked_W[:-1]], dtype=torch.int64, device="cpu").cumsum(0)
    starts_C = starts_W.repeat_interleave(torch.tensor(received_W, dtype=torch.int64, device="cpu"))
    places_C = places.contiguous().view(_PLACE).flatten() + starts_C
    rows_UD[places_C] = rows_CD.contiguous().view(shard.wire_dtype).to(torch.float32)
