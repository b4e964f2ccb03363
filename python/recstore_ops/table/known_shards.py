"""Tables with rows in other processes too, and the refusal of calls that would take one part for the whole.

Modules over such tables ask the other ranks. Calls that name a table, or mean all tables of the process, do not.
"""

from __future__ import annotations

from collections.abc import Iterable

from recstore_ops.servers import store

Part = tuple[int, int]
"""The rank and the number of ranks."""

WHOLE: Part = (0, 1)

TOGETHER = "sharding.save and sharding.load, which all ranks call together, are for the rows of all"
ELSEWHERE = "save it by sharding.save, and do this in one process, which loads that by checkpoint.load"

_parts: dict[int, Part] = {}
"""The part that this process has of each table that it opened, by the table's number."""


def note_part(number: int, part: Part) -> Part:
    """Notes the part that a table is opened or loaded as, and returns the one that it had before, or has now."""
    return _parts.setdefault(number, part)


def note_new(number: int, part: Part) -> None:
    """Notes the part that a new table is opened as."""
    _parts[number] = part


def note_loaded_as(names: Iterable[str], part: Part) -> None:
    """Notes the part that tables were loaded as, so that none is opened as another one."""
    for name in names:
        number = store.find_table(name)
        if number is not None:
            note_part(number, part)


def part_of(name: str) -> Part:
    """The part that this process has of a table's rows; all of them if it has no table of this name."""
    number = store.find_table(name)
    return WHOLE if number is None else _parts.get(number, WHOLE)


def refuse_sharded(call: str, names: Iterable[str] | None, instead: str, but: Part = WHOLE) -> None:
    """Refuses a call that takes the rows that this process has of tables for all of them.

    Args:
        call: as the program wrote it.
        names: the tables that it is about; by default all of the store.
        instead: the call to use for sharded ones.
        but: the part that the call is about.

    Raises:
        RuntimeError: this process has another part of a table.
    """
    if all(part in (WHOLE, but) for part in _parts.values()):
        return  # Without asking servers, which may be there again without the rows that a load brings.
    for name in store.table_names() if names is None else names:
        rank, world = part = part_of(name)
        if part not in (WHOLE, but):
            raise RuntimeError(
                f'{call}: table "{name}" is sharded, and this process has the rows of shard {rank} of {world} only: '
                f"{instead}"
            )


def refuse_other_parts(call: str, names: Iterable[str], part: Part) -> None:
    """Refuses a call of all ranks about tables that are not sharded over them.

    Raises:
        RuntimeError: this process has another part of a table.
    """
    for name in names:
        found = part_of(name)
        if found != part:
            raise RuntimeError(
                f'{call}: this process has shard {found[0]} of {found[1]} of table "{name}", and is rank {part[0]} of '
                f"{part[1]} of the group: all tables of these processes must be sharded over it"
            )
