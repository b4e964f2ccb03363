"""The name of a table's deep copy, and its rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.context import get_spawning_popen

from recstore_ops import _native, servers
from recstore_ops.ops import operators
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


_made: ContextVar[list[str] | None] = ContextVar("made", default=None)
"""The names of the tables that pickles made; `None` if pickles make none."""


@contextmanager
def opening_empty_tables() -> Iterator[None]:
    """Within it a pickle of a module makes the tables that are not open, without rows.

    A pickle, and so `torch.save` of a whole module, holds no rows. Outside it, reading a pickle raises an error if its
    table is not open, since all its ids would have their initial values. It applies to the thread that enters it. After
    an error within it, the tables that were made are dropped again.

    Examples:
        >>> import pickle
        >>> from recstore_ops import DistEmbedding, RecStoreClient
        >>> module = DistEmbedding(None, 2, "item", initializer="zeros")
        >>> module.weight[[3]] = torch.ones(1, 2)
        >>> saved = pickle.dumps(module)
        >>> RecStoreClient().drop("item")
        >>> with opening_empty_tables():
        ...     pickle.loads(saved).weight[[3]]
        tensor([[0., 0.]])
    """
    before = _made.set([])
    try:
        yield
    except BaseException:
        for name in _made.get() or []:
            if store.find_table(name) is not None:
                operators.drop_table(name)
        raise
    finally:
        _made.reset(before)


def note_made(name: str) -> None:
    """Notes a table that a pickle made."""
    made = _made.get()
    if made is not None:
        made.append(name)


def check_open(name: str, owner: str) -> None:
    """Checks that a pickle may open a table.

    Args:
        name: the table's name.
        owner: what was pickled, for the message.

    Raises:
        RuntimeError: it is not open, and `opening_empty_tables` is not in effect.
    """
    if _made.get() is None and store.find_table(name) is None:
        raise RuntimeError(
            f'{owner} over table "{name}" cannot be unpickled: the table is not open in this process and a pickle '
            "holds no rows; load them first, by recstore_ops.checkpoint.load, or make the module and load its "
            "state_dict, or unpickle within recstore_ops.opening_empty_tables() to begin with initial values"
        )


def check_not_spawning(name: str, number: int, owner: str) -> None:
    """Checks that a table does not go to a process that cannot have its rows.

    Raises:
        RuntimeError: a process that is being started, other than by fork, is given a table of this process.
    """
    if get_spawning_popen() is not None and not _is_on_servers(name, number):
        raise RuntimeError(
            f'{owner} over table "{name}" cannot go to a process that is started by spawn or forkserver: its rows are '
            'in this one; start by fork (multiprocessing_context="fork" of a DataLoader), look rows up here, or keep '
            "the table on parameter servers"
        )


def _is_on_servers(name: str, number: int) -> bool:
    return servers.current_ps_backend() != servers.EMBEDDED and store.find_table(name) == number
