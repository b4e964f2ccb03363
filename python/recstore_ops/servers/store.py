"""Calls on the store that the program uses: the servers that it chose, those of its configuration file, or its own.

Every call that names tables, or means all of them, goes through here or, as an operator, through
`recstore_ops.servers.first_call`. So the first call of a program uses the same store as all that follow, whether it
makes a module, loads a checkpoint or asks for statistics. Calls with the number of a table do not go through here: a
number belongs to one store.

Each function raises the errors of `recstore_ops.servers.prepare` and its own.
"""

from __future__ import annotations

from typing import Any

from recstore_ops import _native
from recstore_ops.servers.choosing import EMBEDDED, current_ps_backend, prepare


def find_table(name: str) -> int | None:
    """The number of a table, which no other table ever has; `None` if there is none of this name."""
    prepare()
    return _native.find_table(name)


def table_names() -> list[str]:
    """The names of all tables, sorted: those of this process, or those on the servers that it has chosen."""
    prepare()
    return _native.table_names()


def describe_table(name: str) -> tuple[int, str] | None:
    """The dim of a table and its configuration as JSON; `None` if there is none of this name."""
    prepare()
    return _native.describe_table(name)


def table_statistics(name: str) -> dict[str, Any] | None:
    """The figures of a table's contents and operations; `None` if there is none of this name."""
    prepare()
    return _native.table_statistics(name)


def table_slots(name: str) -> list[tuple[str, int]] | None:
    """The slots of a table's optimizer and their elements a row; `None` if there is no table of this name."""
    prepare()
    return _native.table_slots(name)


def evict_rows(name: str, dry_run: bool, ttl: int | None) -> list[int]:
    """Takes away the rows that a table's eviction chooses, unless it is a `dry_run`, and returns their ids.

    A `ttl` in steps takes the place of the table's own.

    Raises:
        RuntimeError: no row of the table ever leaves, or there is none of this name.
    """
    prepare()
    return _native.evict_rows(name, dry_run, ttl)


def set_memory_limit(limit: int | None) -> None:
    """Limits the memory of the tables of this process together; `None` takes the limit away.

    Raises:
        ValueError: a limit is given and tables are on servers.
    """
    if limit is not None and current_ps_backend() != EMBEDDED:
        raise ValueError(
            "set_memory_limit limits the tables of this process, and they are opened on parameter servers: give a "
            "table a memory_limit, which each server keeps for its part"
        )
    _native.set_memory_limit(limit)


def memory_in_use() -> int:
    """The bytes that the tables of this process take; those on servers take none of it."""
    prepare()
    return _native.store_memory()[1]


def save_tables(
    place: dict[str, Any], arguments: dict[str, Any], progress: _native.CheckpointProgress
) -> dict[str, Any]:
    """Saves all tables; see `recstore_ops.checkpoint.save`."""
    prepare()
    return _native.save_tables(place, arguments, progress)


def save_part_of_tables(
    directory: str,
    snapshot: str,
    shard: tuple[int, int],
    arguments: dict[str, Any],
    progress: _native.CheckpointProgress,
) -> dict[str, Any]:
    """Saves all tables as a part of a snapshot; see `recstore_ops.checkpoint.save_part`."""
    prepare()
    return _native.save_part_of_tables(directory, snapshot, shard, arguments, progress)


def load_tables(
    place: dict[str, Any], arguments: dict[str, Any], progress: _native.CheckpointProgress
) -> dict[str, Any]:
    """Loads the tables of a snapshot, or only some; see `recstore_ops.checkpoint.load`.

    Those with an update rule of another program are refused, or loaded `without_rules`: then their next step is.
    """
    prepare()
    return _native.load_tables(place, arguments, progress)


def barrier(name: str, timeout: float) -> None:
    """Waits for all workers; see `recstore_ops.ps_barrier`."""
    prepare()
    _native.barrier(name, timeout)


def leave_workers() -> None:
    """Says that this worker has finished; see `recstore_ops.leave_ps_workers`."""
    prepare()
    _native.leave_workers()


def workers() -> list[tuple[list[tuple[int, int, float]], int]]:
    """The workers as each server sees them; see `recstore_ops.ps_workers`."""
    prepare()
    return _native.workers()


__all__ = [
    "barrier",
    "describe_table",
    "evict_rows",
    "find_table",
    "leave_workers",
    "load_tables",
    "memory_in_use",
    "save_part_of_tables",
    "save_tables",
    "set_memory_limit",
    "table_names",
    "table_slots",
    "table_statistics",
    "workers",
]
