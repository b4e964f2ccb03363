"""Starts the servers of `recstore_ops.ray`, and connects clients to them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from recstore_ops import servers as chosen
from recstore_ops.ray.actors import NAMESPACE, AddressBook, Restart, Shard, ShardSettings, book_name, find_book
from recstore_ops.servers.server_config import HASH_METHODS, Tls

PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
DURABILITIES = ("wal", "checkpoint")

_WAIT = 10.0
_CHECK_EVERY = 0.5
_MAX_CLIENTS = 100_000

_log = logging.getLogger("recstore_ops.ray")
_lock = threading.Lock()
_followers: dict[str, _Follower] = {}
"""Within a process: who follows which servers, by their name."""


class Servers:
    """Shards that run as actors, until `stop` or the end of the program that started them.

    Attributes:
        name: by which `connect` finds them.
        shards: the actors, in the order of the shards.
    """

    def __init__(self, name: str, book: Any, group: PlacementGroup, shards: list[Any]) -> None:
        self.name = name
        self.shards = shards
        self._book, self._group = book, group

    def addresses(self, timeout: float = 60.0) -> list[str]:
        """The addresses of the shards now, `host:port` each.

        Raises:
            TimeoutError: a shard has no address for so long.
        """
        return _addresses(self._book, self.name, timeout)[0]

    def restarts(self, timeout: float = 60.0) -> list[Restart]:
        """The shards that were started again, and what each lost by that.

        Raises:
            TimeoutError: a shard has no address for so long.
        """
        return _addresses(self._book, self.name, timeout)[1]

    def use(self, *, tls: Tls | None = None, timeout: float = 120.0) -> None:
        """Opens tables on these servers from now on, in this process; see `connect`."""
        connect(self.name, tls=tls, timeout=timeout)

    def stop(self) -> None:
        """Saves the tables of shards that have a directory, and ends all actors."""
        disconnect(self.name)
        try:
            ray.get([shard.stop.remote() for shard in self.shards])
        finally:
            _end(self._book, self._group, self.shards)


def start_servers(
    num_shards: int,
    *,
    data: str | PathLike[str] | None = None,
    durability: str = "wal",
    placement: str = "SPREAD",
    resources_per_shard: Mapping[str, float] | None = None,
    checkpoint_every: float = 600.0,
    hash_method: str = "city_hash",
    token: str | None = None,
    tls: Tls | None = None,
    insecure: bool = False,
    name: str = "recstore",
    timeout: float = 120.0,
) -> Servers:
    """Starts a server for each shard as an actor. If it ends, Ray starts it again, on another node if need be.

    Args:
        num_shards: how many.
        data: a directory that every node sees under this path; each shard has one of its own there.
        durability: `"wal"`: a shard that is started again has all that it acknowledged, and needs `data`.
            `"checkpoint"`: it has what it last saved to `data`, if anything. A loss is logged as a warning and reported
            by `restarts`.
        placement: Ray's strategy for the shards, `"SPREAD"`, `"PACK"`, `"STRICT_SPREAD"` or `"STRICT_PACK"`.
        resources_per_shard: what Ray keeps for each; `{"CPU": 1}` by default.
        checkpoint_every: seconds between checkpoints to `data`.
        hash_method: how ids are spread, `"city_hash"` or `"simple_mod"`.
        token: the token that clients must send, which they get from Ray.
        tls: encrypts, with files that every node has. Needed, with a token, unless nodes have loopback addresses.
        insecure: does without both, for a trusted network.
        name: by which `connect` finds the servers.
        timeout: seconds until all must serve.

    Raises:
        ValueError: an argument is not what it should be, or the name is taken.
        RuntimeError: there is no room for the shards, or one does not start.
    """
    settings = ShardSettings(
        num_shards=num_shards,
        data=None if data is None else str(Path(data).absolute()),
        is_logged=durability == "wal",
        checkpoint_every=checkpoint_every,
        token=token,
        tls=tls,
        insecure=insecure,
    )
    _check(settings, durability, placement, hash_method)
    bundle = {"CPU": 1.0, **(resources_per_shard or {})}
    book = _start_book(name, num_shards, hash_method, token)
    group = placement_group([bundle] * num_shards, strategy=placement)
    shards: list[Any] = []
    try:
        if not group.wait(timeout):
            raise RuntimeError(f"no room in the cluster for {num_shards} shards of {bundle} each, placed {placement}")
        shards += [_start_shard(number, settings, name, (group, bundle)) for number in range(num_shards)]
        _await_start(shards, timeout)
    except BaseException:
        _end(book, group, shards)
        raise
    return Servers(name, book, group, shards)


def connect(name: str = "recstore", *, tls: Tls | None = None, timeout: float = 120.0) -> None:
    """Opens tables of this process on servers of the cluster from now on, and calls them wherever they are moved.

    To call it again in the same process, as tasks do, does no harm.

    Args:
        name: of the servers.
        tls: encrypts, and says whom to trust.
        timeout: seconds that a call may take with all its attempts; a shard that is being started again takes some.

    Raises:
        ValueError: there are no servers of the name.
        TimeoutError: a shard is nowhere for `timeout` seconds.
        ConnectionError: a server does not answer, or refuses.
    """
    with _lock:
        book = find_book(name)
        known = _followers.get(name)
        # Another book under the name belongs to servers that were started anew.
        if known is not None and known.book == book and known.is_alive():
            return
        hash_method, token = ray.get(book.entry.remote())
        addresses, restarts = _addresses(book, name, timeout)
        choice = chosen.ServerChoice(tuple(addresses), hash_method, token, tls, timeout)
        follower = _Follower(book, chosen.use_servers(choice), addresses, restarts)
        _followers[name] = follower
        follower.start()


def disconnect(name: str = "recstore") -> None:
    """Stops following the servers. Open tables keep their addresses."""
    with _lock:
        follower = _followers.pop(name, None)
    if follower is not None:
        follower.is_over.set()
        follower.join()


class _Follower(threading.Thread):
    """Waits for servers to move, and gives their new addresses to the tables on them."""

    def __init__(self, book: Any, number: int, addresses: list[str], told: list[Restart]) -> None:
        super().__init__(name="recstore-follow", daemon=True)
        self.book = book
        self.is_over = threading.Event()
        self._number, self._addresses, self._told = number, addresses, set(told)

    def run(self) -> None:
        while not self.is_over.is_set():
            try:
                news = self._news()
            except (RayError, ConnectionError):
                # The address book is being started again, or the cluster has gone.
                if not ray.is_initialized():
                    return
                self.is_over.wait(_CHECK_EVERY)
                continue
            if news is not None:
                self._move(*news)

    def _news(self) -> tuple[list[str], list[Restart]] | None:
        """Waits for news in short intervals, so that the wait can be ended."""
        asked = self.book.changed.remote(self._addresses, _WAIT)
        while not self.is_over.is_set():
            done, _ = ray.wait([asked], timeout=_CHECK_EVERY)
            if done:
                return ray.get(asked)
        return None

    def _move(self, addresses: list[str], restarts: list[Restart]) -> None:
        chosen.move_servers(self._number, addresses)
        for restart in restarts:
            if restart not in self._told:
                _log.log(logging.INFO if restart.restored_from is None else logging.WARNING, "%s", restart)
        self._addresses, self._told = addresses, set(restarts)


def _check(settings: ShardSettings, durability: str, placement: str, hash_method: str) -> None:
    if settings.num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {settings.num_shards}")
    for argument, given, known in (
        ("durability", durability, DURABILITIES),
        ("placement", placement, PLACEMENTS),
        ("hash_method", hash_method, HASH_METHODS),
    ):
        if given not in known:
            raise ValueError(f"{argument} must be one of {known}, got {given!r}")
    if settings.is_logged and settings.data is None:
        raise ValueError('durability="wal" needs data, a directory that every node sees')
    if settings.checkpoint_every <= 0:
        raise ValueError(f"checkpoint_every must be positive, got {settings.checkpoint_every}")


def _start_book(name: str, num_shards: int, hash_method: str, token: str | None) -> Any:
    book = ray.remote(AddressBook).options(
        name=book_name(name),
        namespace=NAMESPACE,
        # The book only waits, and takes no core from a shard.
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        # Each client has a call that waits in the book for news.
        max_concurrency=_MAX_CLIENTS,
        # Beside the program, with which it ends anyhow.
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
    )
    return book.remote(num_shards, hash_method, token)


def _start_shard(
    number: int, settings: ShardSettings, name: str, place: tuple[PlacementGroup, dict[str, float]]
) -> Any:
    group, bundle = place
    own = dict(bundle)
    options = {"num_cpus": own.pop("CPU"), "num_gpus": own.pop("GPU", 0), "memory": own.pop("memory", None)}
    shard = ray.remote(Shard).options(
        **options,
        resources=own,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        max_restarts=-1,
        max_task_retries=-1,
    )
    return shard.remote(number, settings, name)


def _await_start(shards: list[Any], timeout: float) -> None:
    until = time.monotonic() + timeout
    for number, shard in enumerate(shards):
        try:
            ray.get(shard.address.remote(), timeout=max(0.0, until - time.monotonic()))
        except RayError as error:
            raise RuntimeError(f"shard {number} of {len(shards)} does not start: {error}") from error


def _addresses(book: Any, name: str, timeout: float) -> tuple[list[str], list[Restart]]:
    found: Any = ray.get(book.changed.remote([], timeout))
    if found is None:
        raise TimeoutError(f"a shard of the servers {name!r} is nowhere for {timeout} seconds")
    return found


def _end(book: Any, group: PlacementGroup, shards: list[Any]) -> None:
    for actor in (*shards, book):
        ray.kill(actor)
    remove_placement_group(group)
