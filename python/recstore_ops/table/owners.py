"""Tables that go with the last of their owners; all others stay until they are dropped."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter

from torch.utils._python_dispatch import _disable_current_modes

from recstore_ops.ops import operators
from recstore_ops.servers import store

opening = threading.RLock()
"""Held while a table is opened and first filled: of several threads one creates it, and none sees it half filled."""

os.register_at_fork(before=opening.acquire, after_in_parent=opening.release, after_in_child=opening.release)

# How many owners each table has that goes with the last of them, by its number.
_owners: Counter[int] = Counter()


def own(owner: object, name: str, number: int) -> None:
    """Makes a table go with the last of its owners, one of whom `owner` is for as long as it lives."""
    _owners[number] += 1
    weakref.finalize(owner, _disown, name, number, os.getpid())


def is_owned(number: int) -> bool:
    """Whether the table of a number goes with the last of its owners."""
    return number in _owners


def keep(number: int) -> None:
    """Makes the table of a number stay when its owners are gone."""
    _owners.pop(number, None)


def _disown(name: str, number: int, owner_pid: int) -> None:
    """Drops a table with its last owner; a forked child only holds copies of its parent's."""
    if os.getpid() != owner_pid:
        return
    with opening:
        if number not in _owners:
            return
        _owners[number] -= 1
        if _owners[number] == 0:
            del _owners[number]
            # An owner may be collected as garbage while something else is traced.
            with _disable_current_modes():
                if store.find_table(name) == number:
                    operators.drop_table(name)
