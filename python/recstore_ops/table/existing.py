"""Tables that exist when a module over them is made: whether it goes on with their rows.

A notebook cell that runs again, or the next fold of a cross validation, makes the model anew, and its tables still have
the rows that were trained before. Mostly a name still has the model before, so that its being alive says nothing.

Modules of one model share a table on purpose. That shows if both are made before a row is trained, or both in the
constructor of the module that holds them. Any other that is made afterwards warns, without `on_existing`.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

from torch import nn

from recstore_ops import _native, servers
from recstore_ops.config.table_config import TableConfig
from recstore_ops.config.table_options import OnExisting
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.table.given_up import note_given_up
from recstore_ops.table.program_line import warn_program
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import Table, disagreeing_on_error, open_tables

_SHARED, _FREE, _ROWS, _TRAINED, _IN_USE = _STATES = range(5)
"""How a table is found: shared within the model that is being made; nowhere or empty; with rows; with rows that an
earlier module has changed; with an owner."""

_CHOICES = (None, *get_args(OnExisting))

_before: dict[int, tuple[int, int]] = {}
"""The rows and the step of each table when a module first opened it, or a checkpoint was loaded, by its number."""

_loads: Counter[int] = Counter()
"""How often each table got the rows of a checkpoint, by its number."""

_stepped: dict[int, int] = {}
"""How often each table was loaded when an optimizer last stepped it, by its number; not once a module is made anew."""

_models: dict[int, weakref.ref[nn.Module]] = {}
"""In whose constructor a module over each table was made last, by the table's number."""


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


def note_module(table: Table) -> None:
    """Notes that a module opened a table, for those made after it."""
    number = table.table_id
    if number not in _before:
        _before[number] = _progress(number)
    _stepped.pop(number, None)
    model = _model_in_making()
    if model is None:
        _models.pop(number, None)
    else:
        _models[number] = weakref.ref(model)


def note_stepped(tables: Iterable[Table]) -> None:
    """Notes that an optimizer stepped tables, for one that is made after it over the same modules."""
    _stepped.update({table.table_id: times_loaded(table) for table in tables})


def warn_of_kept_state(tables: Iterable[Table]) -> None:
    """Warns of tables that an optimizer stepped before, and that keep more than rows, for a new one."""
    stepped = [table for table in tables if _stepped.get(table.table_id) == times_loaded(table)]
    kept = {table.name: [name for name, _ in store.table_slots(table.name) or []] for table in stepped}
    for name, slots in kept.items():
        if slots:
            warn_program(
                f'table "{name}" keeps {", ".join(slots)} of an earlier SparseOptimizer, and a new one goes on with '
                'them, where one of torch.optim begins without: on_existing="share" says that this is meant'
            )


def note_loaded(names: list[str]) -> None:
    """Notes that tables have the rows of a checkpoint, with which a module made afterwards is meant to go on."""
    for name in names:
        number = store.find_table(name)
        if number is not None:
            if number in _before:
                _before[number] = _progress(number)
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
        ValueError: the table has rows or an owner, with `error`; ranks that choose differently; or with `reset` an
            invalid configuration.
        RuntimeError: another rank could not open its shard.
    """
    number = store.find_table(name)
    with disagreeing_on_error(shard):
        state = _FREE if number is None else _state(number, choice)
    if shard is not None and not shard.is_alone:
        state = _agreed(shard, name, state, choice)
    if choice is None and state == _TRAINED and number is not None:
        _warn(name, number)
    elif choice == "error":
        _refuse(name, number, state)
    elif choice == "reset" and number is not None and state != _SHARED:
        with disagreeing_on_error(shard):
            _give_up(name, dim, config)
            note_given_up(number)


def _progress(number: int) -> tuple[int, int]:
    statistics = _native.statistics_of(number)
    return (0, 0) if statistics is None else (statistics["rows"], statistics["step"])


def _state(number: int, choice: str | None) -> int:
    if choice == "share":
        return _FREE
    if choice != "error" and _is_of_model_in_making(number):
        return _SHARED
    progress = _progress(number)
    if choice == "error" and _is_in_use(number):
        return _IN_USE
    if progress == (0, 0):
        return _FREE
    return _TRAINED if _before.get(number, progress) != progress else _ROWS


def _is_of_model_in_making(number: int) -> bool:
    model = _models.get(number, lambda: None)()
    return model is not None and model is _model_in_making()


def _model_in_making() -> nn.Module | None:
    """The module whose constructor called, directly or not: of several, the one that holds the others."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount > 0:
            made = frame.f_locals.get(code.co_varnames[0])
            found = made if isinstance(made, nn.Module) else found
        frame = frame.f_back
    return found


def _is_in_use(number: int) -> bool:
    # No list of them outlives this call: it would keep them alive below.
    def has_owners() -> bool:
        return any(table.table_id == number and not table.is_looked_up for table in open_tables())

    if not has_owners():
        return False
    gc.collect()  # A module in a reference cycle is there until it is collected.
    return has_owners()


def _agreed(shard: Shard, name: str, state: int, choice: str | None) -> int:
    """The state of the table over all ranks, which may have different rows."""
    # Choice and state in one number, so that one exchange compares both.
    found = shard.told(name, _CHOICES.index(choice) * len(_STATES) + state)
    choices = [_CHOICES[each // len(_STATES)] for each in found]
    other = next((rank for rank, each in enumerate(choices) if each != choice), None)
    if other is not None:
        raise ValueError(
            f'table "{name}": rank {other} has on_existing={choices[other]!r}, rank {shard.rank} {choice!r}'
        )
    return max(each % len(_STATES) for each in found)


def _warn(name: str, number: int) -> None:
    warn_program(
        f'table "{name}" exists, and a new module goes on with its {_progress(number)[0]} rows, which an earlier one '
        'trained or wrote: on_existing="share" says that this is meant, "reset" begins anew, "error" raises'
    )


def _refuse(name: str, number: int | None, state: int) -> None:
    """Refuses a table for `on_existing="error"`."""
    if state == _IN_USE:
        raise ValueError(
            f'table "{name}" is in use by a module, a Table or a DistTensor that is alive, and on_existing="error" '
            "is for a table that nothing else uses"
        )
    if state != _FREE:
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
