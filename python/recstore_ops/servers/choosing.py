"""The choice of a store, as `recstore_ops.servers` describes it, and the calls that make it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recstore_ops import _native
from recstore_ops.config.config_file import ConfigFile, active_config
from recstore_ops.config.tokens import check_token
from recstore_ops.servers.addresses import check_addresses
from recstore_ops.servers.server_config import ServerAddress, ServerList, Tls, chosen_servers, known_servers

EMBEDDED = "embedded"
SERVERS = "servers"
DEFAULT_PORT = 15000

WireDtype = Literal["float32", "bfloat16"]
"""How rows of lookups and gradients travel."""

# Reentrant: `prepare` calls `use_servers` while it holds the lock.
_lock = threading.RLock()
# A child forked while another thread holds it would wait for ever.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

_under_way: set[Future[Any]] = set()
"""Work of threads with the tables on the servers that are chosen now."""

os.register_at_fork(after_in_child=_under_way.clear)

_WORKERS = range(2**32)
"""The numbers that workers may have."""


@dataclass
class _Choice:
    """The choice: the backend; whether the program or its configuration file made it; how often it is put off."""

    backend: str = EMBEDDED
    was_made: bool = False
    times_put_off: int = 0


_choice = _Choice()


@dataclass(frozen=True)
class ServerChoice:
    """Servers that a program calls: see `set_ps_servers`."""

    addresses: tuple[str, ...]
    hash_method: str = "city_hash"
    token: str | None = None
    tls: Tls | None = None
    timeout: float = 30.0
    worker: int | None = None
    wire_dtype: WireDtype = "float32"
    shared_memory: bool = True


def set_ps_config(host: str, port: int) -> None:
    """Opens tables on the server of one shard at `host`:`port` from now on.

    Args:
        host: a name or an address; empty for this machine.
        port: its bulk port; 0 for RecStore's default, 15000.

    Raises:
        ConnectionError: the server does not answer, or refuses; then nothing has changed.
    """
    set_ps_servers([str(ServerAddress(host or "127.0.0.1", port or DEFAULT_PORT, 0))])


def set_ps_servers(
    servers: Sequence[str],
    hash_method: str = "city_hash",
    *,
    token: str | None = None,
    tls: Tls | None = None,
    timeout: float = 30.0,
    worker: int | None = None,
    wire_dtype: WireDtype = "float32",
    shared_memory: bool = True,
) -> None:
    """Opens tables on servers from now on, each row on one of them.

    Args:
        servers: `host:port` of the bulk ports, in the order of the shards. The servers of one shard that follow one
            another stand together, `host:port|host:port`: the one that leads is called. A server of this machine may
            be the path of its Unix socket, `unix:/path`.
        hash_method: how ids are spread, `city_hash` or `simple_mod`; all programs that share servers say the same.
        token: the token that the servers expect.
        tls: encrypts, and names the trusted certificates; servers that do not encrypt are refused then.
        timeout: seconds that a call may take with all its attempts; then it raises and names the shard.
        worker: the number, from 0, of the worker that this process is; see `recstore_ops.servers.workers`. None takes
            part in nothing that needs workers.
        wire_dtype: how the rows of lookups and gradients travel. `bfloat16` halves their bytes and rounds each value to
            the nearest, which is off by 2^-9 of it at most. Rows on the servers, and all else that travels, stay as
            they are.
        shared_memory: whether ids, rows and gradients go through memory that is shared with the server, where it is
            called by its Unix socket. If there is none to share, they go through the socket, and a line on the error
            stream says so once.

    Raises:
        TypeError: servers that are no list of texts, or a worker that is no int.
        ValueError: no server, one that is neither `host:port` nor a socket, an unknown `hash_method` or `wire_dtype`, a
            file of `tls` that cannot be used, or a worker that the servers do not expect.
        ConnectionError: a server does not answer, or refuses; then nothing has changed.
    """
    addresses = tuple(check_addresses(servers))
    use_servers(ServerChoice(addresses, hash_method, token, tls, timeout, worker, wire_dtype, shared_memory))


def use_servers(choice: ServerChoice) -> int:
    """Opens tables on servers from now on, as `set_ps_servers`, and returns the number that `move_servers` takes."""
    addresses, hash_method = check_addresses(choice.addresses), choice.hash_method
    _check_worker(choice.worker)
    check_token(choice.token)
    # Before the lock is taken: a save on servers may last, and other calls need the lock meanwhile.
    wait(list(_under_way))
    with _lock:
        number = _native.use_servers(
            addresses,
            hash_method,
            choice.token,
            choice.timeout,
            choice.tls,
            choice.worker,
            choice.wire_dtype,
            choice.shared_memory,
        )
        _choice.backend, _choice.was_made = SERVERS, True
    return number


def _check_worker(worker: int | None) -> None:
    if worker is None:
        return
    if not isinstance(worker, int) or isinstance(worker, bool):
        raise TypeError(f"worker must be an int from 0 on, got {worker!r}")
    if worker not in _WORKERS:
        raise ValueError(f"worker must be from 0 to {_WORKERS[-1]}, got {worker}")


def move_servers(number: int, addresses: Sequence[str]) -> None:
    """Calls servers that were started again elsewhere at their new addresses; calls under way go on there too.

    Args:
        number: what `use_servers` returned.
        addresses: `host:port` of the bulk ports, in the order of the shards.

    Raises:
        TypeError: addresses that are no list of texts.
        ValueError: no such number, another number of servers, or an address that is not `host:port`.
    """
    _native.move_servers(number, check_addresses(addresses))


def set_ps_backend(backend: str) -> None:
    """Opens tables in this process (`"embedded"`) or on the configuration file's servers (`"servers"`) from now on.

    Raises:
        ValueError: another backend, or the file names no servers.
        ConnectionError: a server does not answer, or refuses; then nothing has changed.
    """
    if backend not in (EMBEDDED, SERVERS):
        raise ValueError(f'the backend must be "{EMBEDDED}" or "{SERVERS}", got "{backend}"')
    wait(list(_under_way))
    with _lock:
        if backend == EMBEDDED:
            _native.use_embedded()
            _choice.backend, _choice.was_made = EMBEDDED, True
            return
        config = active_config()
        found = known_servers(config) if config else None
        if config is None or found is None:
            raise ValueError("no configuration file names servers: name them with set_ps_config or set_ps_servers")
        _use(config, found)


def current_ps_backend() -> str:
    """The backend of new tables: `"embedded"` or `"servers"`."""
    prepare()
    return _choice.backend


def prepare() -> None:
    """Makes the configuration file's choice, unless the program has made one.

    It goes before every call that means the tables of the program without naming a store. These calls are in
    `recstore_ops.servers.store` and `recstore_ops.servers.first_call`.

    Raises:
        ValueError, OSError: the file cannot be read, or holds what it must not.
        ConnectionError: a server of the file does not answer; the next call tries again.
    """
    # Every call on tables comes here. Only those before the first choice take the lock.
    if _choice.was_made:
        return
    with _lock:
        if is_settled():
            return
        config = active_config()
        found = chosen_servers(config) if config else None
        if config is not None and found is not None:
            _use(config, found)
        _choice.was_made = True


def keep_choice_until_done(work: Future[Any]) -> None:
    """Makes a choice of another store wait until `work`, which a thread does with the present one, has ended."""
    _under_way.add(work)
    work.add_done_callback(_under_way.discard)


def is_settled() -> bool:
    """Whether nothing is left to the configuration file: a choice was made, or is put off."""
    return _choice.was_made or _choice.times_put_off > 0


def was_chosen() -> bool:
    """Whether a choice was made, by the program or its configuration file."""
    return _choice.was_made


@contextmanager
def embedded_for(what: str) -> Iterator[None]:
    """Keeps tables in this process for a while, whatever the configuration file says.

    Raises:
        ValueError: the program has chosen servers; `what` needs a process that has not.
    """
    with _lock:
        if _choice.backend == SERVERS:
            raise ValueError(f"{what} needs a process that keeps its tables itself; this one has chosen servers")
        # The count alone is under the lock, so that what runs within holds up no other thread.
        _choice.times_put_off += 1
    try:
        yield
    finally:
        with _lock:
            _choice.times_put_off -= 1


def use_constructor_address(ps_host: str | None, ps_port: int | None) -> None:
    """Chooses the server that a collection was given, if any.

    Raises:
        ConnectionError: it does not answer.
    """
    if ps_host is not None or ps_port is not None:
        set_ps_config(ps_host or "", ps_port or 0)


def _use(config: ConfigFile, found: ServerList) -> None:
    with _naming(config.path):
        set_ps_servers(found.addresses, found.hash_method, token=found.token, tls=found.tls)


def try_servers(path: Path, found: ServerList, timeout: float) -> None:
    """Connects to the servers of a configuration file, and opens no table there.

    Raises:
        ValueError: as `set_ps_servers`, with the path of the file.
        OSError: a file of `tls` cannot be read, or, a `ConnectionError`, a server does not answer within `timeout`.
    """
    with _naming(path):
        _native.try_servers(check_addresses(found.addresses), found.hash_method, found.token, timeout, found.tls)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Names the configuration file in errors about its servers: the program may not know that there is one."""
    try:
        yield
    except (OSError, ValueError) as error:
        kinds = (ConnectionError, OSError, ValueError)
        raise next(kind for kind in kinds if isinstance(error, kind))(f"{path} names servers: {error}") from error
