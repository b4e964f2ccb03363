"""Tables that exist when a module over them is made: whether it goes on with their rows.

A notebook cell that runs again, or the next fold of a cross validation, makes the model anew, and its tables still have
the rows that were trained before.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections import Counter
from typing import Any, get_args

from recstore_ops import _native, servers
from recstore_ops.config.table_config import TableConfig
from recstore_ops.config.table_options import OnExisting
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import Table, disagreeing_on_error, open_tables

_FREE, _ROWS, _TRAINED, _IN_USE = range(4)
"""How a table is found: nowhere or empty; with rows; with rows that an earlier module has changed; with an owner."""

_CHOICES = (None, *get_args(OnExisting))

_before: dict[int, tuple[int, int]] = {}
"""The rows and the step of each table when a module first opened it, by its number."""

_loads: Counter[int] = Counter()
"""How often each table got the rows of a checkpoint, by its number."""

_warned: set[int] = set()

_in_use: weakref.WeakSet[Table] = weakref.WeakSet()
"""Tables that were in use when the process was last searched for reference cycles, which takes long: a model of many
tables that shares those of another has it searched once."""


def check_choice(choice: str | None, name: str) -> None:
    """Checks the option `on_existing`.

    Raises:
        ValueError: it is none of its values, or gives up rows on servers.
    """
    if choice not in _CHOICES:
        raise ValueError(f'table "{name}": on_existing must be "share", "error" or "reset", got {choice!r}')
    if choice == "reset" and servers.current_ps_backend() != servers.EMBEDDED:
        raise ValueError(
            f'table "{name}" lies on parameter servers, where other programs may use it: on_existing="reset" gives up '
            "tables of this process only; RecStoreClient.drop drops it"
        )


def check_unused(name: str) -> None:
    """Checks that rows of a table may be given up.

    Raises:
        ValueError: something that is alive uses it.
    """
    number = store.find_table(name)
    if number is not None and _is_in_use(number, "reset"):
        _refuse(name, number, _IN_USE, "reset")


def note_module(table: Table) -> None:
    """Notes that a module opened a table, for those made after it."""
    if table.table_id not in _before:
        _before[table.table_id] = _progress(table.table_id)


def note_loaded(names: list[str]) -> None:
    """Notes that tables have the rows of a checkpoint, with which a module made afterwards is meant to go on."""
    for name in names:
        number = store.find_table(name)
        if number is not None:
            _before.pop(number, None)
            _loads[number] += 1


def times_loaded(table: Table) -> int:
    """How often this process gave a table the rows and the learning rate of a checkpoint."""
    return _loads[table.table_id]


def settle_existing(
    name: str, dim: int, config: TableConfig, shard: Shard | None, choice: OnExisting | None = None
) -> None:
    """Does with a table that exists what `on_existing` says, before a module opens it; all ranks of a shard alike.

    Args:
        name: the table's name.
        dim: elements a row of the table asked for.
        config: of the table asked for.
        shard: this process's part of it, if it has only one.
        choice: `on_existing`.

    Raises:
        ValueError: the table has rows, with `error`; or has an owner, with `error` or `reset`; ranks that choose
            differently; or with `reset` an invalid configuration.
        RuntimeError: another rank could not open its shard.
    """
    number = store.find_table(name)
    with disagreeing_on_error(shard):
        state = _FREE if number is None else _state(number, choice)
    if shard is not None and not shard.is_alone:
        state = _agreed(shard, name, state, choice)
    if choice is None:
        _warn(name, number, state)
    elif choice != "share":
        _refuse(name, number, state, choice)
        if choice == "reset" and number is not None:
            with disagreeing_on_error(shard):
                _give_up(name, dim, config)


def _progress(number: int) -> tuple[int, int]:
    statistics = _native.statistics_of(number)
    return (0, 0) if statistics is None else (statistics["rows"], statistics["step"])


def _state(number: int, choice: str | None) -> int:
    if choice == "share":
        return _FREE
    progress = _progress(number)
    is_changed = _before.get(number, progress) != progress
    found = _FREE if progress == (0, 0) else _TRAINED if is_changed else _ROWS
    # The search for owners may collect garbage, which takes long, and its result would change nothing.
    if choice is None and (found != _TRAINED or number in _warned):
        return found  # Nothing is said of it, in use or not.
    return _IN_USE if _is_in_use(number, choice) else found


def _is_in_use(number: int, choice: str | None) -> bool:
    # No list of them outlives this call: it would keep them alive below.
    def owners() -> list[Table]:
        return [table for table in open_tables() if table.table_id == number and not table.is_looked_up]

    if not owners():
        return False
    if choice is not None or not any(table in _in_use for table in owners()):
        gc.collect()  # A module in a reference cycle is there until it is collected.
        _in_use.update(open_tables())
    return bool(owners())


def _agreed(shard: Shard, name: str, state: int, choice: str | None) -> int:
    """The state of the table over all ranks, which may have different rows."""
    # Choice and state in one number, so that one exchange compares both. There are as many states as choices.
    found = shard.told(name, _CHOICES.index(choice) * len(_CHOICES) + state)
    choices = [_CHOICES[each // len(_CHOICES)] for each in found]
    other = next((rank for rank, each in enumerate(choices) if each != choice), None)
    if other is not None:
        raise ValueError(
            f'table "{name}": rank {other} has on_existing={choices[other]!r}, rank {shard.rank} {choice!r}'
        )
    return max(each % len(_CHOICES) for each in found)


def _warn(name: str, number: int | None, state: int) -> None:
    if state != _TRAINED or number is None or number in _warned:
        return
    _warned.add(number)
    warnings.warn(
        f'table "{name}" exists, and a new module goes on with its {_progress(number)[0]} rows, which an earlier one '
        'trained or wrote: on_existing="share" says that this is meant, "reset" begins anew, "error" raises',
        stacklevel=_levels_to_program() + 1,
    )


def _levels_to_program() -> int:
    """How many calls there are between this function's caller and the program's own code."""
    frame, levels = sys._getframe(1), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("recstore_ops"):
        frame, levels = frame.f_back, levels + 1
    return levels


def _refuse(name: str, number: int | None, state: int, choice: str) -> None:
    if state == _IN_USE:
        raise ValueError(
            f'table "{name}" is in use by a module, a Table or a DistTensor that is alive, and on_existing="{choice}" '
            "is for a table that nothing else uses"
        )
    if choice == "error" and state != _FREE:
        rows = 0 if number is None else _progress(number)[0]
        raise ValueError(
            f'table "{name}" exists with {rows} rows, and on_existing="error": "share" goes on with them, "reset" '
            "begins anew, and RecStoreClient.drop drops the table"
        )


def _give_up(name: str, dim: int, config: TableConfig) -> None:
    """Drops a table, once it is sure that one of the new configuration can be opened."""
    trial = f"{name}/trial of a new configuration"
    handle: Any = None
    try:
        handle = operators.make_hashtable(trial, dim, config.to_json())
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    operators.hashtable_release(handle)
    operators.drop_table(trial)
    operators.drop_table(name)
