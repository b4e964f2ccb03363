"""The name of a table's deep copy, and its rows."""

from __future__ import annotations

import re

from recstore_ops import _native
from recstore_ops.servers import store
from recstore_ops.table.shard import Shard

_COPY = re.compile(r"\.copy\d*$")


def copy_content(name: str, number: int, shard: Shard | None) -> str:
    """Copies what a table holds to a new one, and returns the name of that.

    It is the first that is free of `user.copy`, `user.copy2` and so on for the table `user` and its copies. The ranks
    of a sharded table find one together, and each copies its part.

    Raises:
        RuntimeError: the table was dropped, or lies on servers, or elsewhere than tables are opened now; or there is no
            memory for the copy.
    """
    if store.find_table(name) != number:
        raise RuntimeError(f'table "{name}" cannot be copied: it was dropped, or tables are opened elsewhere now')
    copy = _free_name(name, shard)
    _native.copy_table(number, copy)
    return copy


def _free_name(name: str, shard: Shard | None) -> str:
    base = _COPY.sub("", name)
    place = _next_free(base, 1)
    if shard is not None and not shard.is_alone:
        # Until all ranks find the same one free.
        while len(set(places := shard.told(name, place))) > 1:
            place = _next_free(base, max(places))
    return _name_at(base, place)


def _next_free(base: str, place: int) -> int:
    while store.find_table(_name_at(base, place)) is not None:
        place += 1
    return place


def _name_at(base: str, place: int) -> str:
    return f"{base}.copy" if place == 1 else f"{base}.copy{place}"
