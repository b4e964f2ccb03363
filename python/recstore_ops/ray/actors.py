"""The Ray actors of `recstore_ops.ray`: the shards, and the address book in which clients find them."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import ray

from recstore_ops import _native
from recstore_ops.servers.serve_settings import Durability, ServeSettings
from recstore_ops.servers.server_config import Tls
from recstore_ops.servers.workers import WorkerSync

ANNOUNCE_EVERY = 5.0
"""Seconds between announcements, which restore the entries of an address book that was started again."""

NAMESPACE = "recstore"

_RETRY_EVERY = 1.0


def find_book(name: str) -> Any:
    """The address book of the servers `name`.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(book_name(name), namespace=NAMESPACE)


def book_name(name: str) -> str:
    """The name in Ray of the address book of the servers `name`."""
    return f"recstore/{name}"


@dataclass(frozen=True)
class ShardSettings:
    """How all shards are served; see `recstore_ops.ray.start_servers`."""

    num_shards: int
    data: str | None
    is_logged: bool
    checkpoint_every: float
    token: str | None
    tls: Tls | None
    insecure: bool

    def directory(self, shard: int) -> Path | None:
        """The directory of a shard's tables."""
        return None if self.data is None else Path(self.data) / f"shard-{shard}-of-{self.num_shards}"

    def restored_from(self, shard: int) -> str | None:
        """The state from which a shard restores its tables; None if nothing is lost, because it has a log."""
        directory = self.directory(shard)
        if directory is None:
            return "nothing"
        if self.is_logged:
            return None if (directory / "incarnation").is_file() else "nothing"
        manifest = directory / "manifest.json"
        if not manifest.is_file():
            return "nothing"
        return f"the checkpoint of {datetime.fromtimestamp(manifest.stat().st_mtime).isoformat(' ', 'seconds')}"

    def start(self, shard: int, host: str) -> _native.Server:
        """Starts a server, with the tables that its directory has."""
        directory = self.directory(shard)
        return _native.Server(
            host=host,
            port=0,
            shard=shard,
            num_shards=self.num_shards,
            grpc_port=None,
            health_port=None,
            metrics_host=host,
            metrics_port=None,
            max_connections=ServeSettings().max_connections,
            token=self.token,
            tls=self.tls,
            insecure=self.insecure,
            directory=None if directory is None else str(directory),
            durability=(Durability.WAL if self.is_logged else Durability.CHECKPOINT).value,
            workers=WorkerSync(),
            follow=None,
            synchronous=False,
        )


@dataclass(frozen=True)
class Restart:
    """A shard that was started again.

    Attributes:
        shard: its number.
        address: its address now.
        time: of the restart, in seconds since the epoch.
        restored_from: the state from which its rows were restored; None if nothing is lost.
    """

    shard: int
    address: str
    time: float
    restored_from: str | None

    def __str__(self) -> str:
        begun = f"shard {self.shard} was started again at {self.address}"
        if self.restored_from is None:
            return f"{begun}; nothing is lost"
        return f"{begun} from {self.restored_from}: what came after is lost"


class AddressBook:
    """The actor that knows the addresses of the shards. If it is started again, the shards send them again."""

    def __init__(self, num_shards: int, hash_method: str, token: str | None) -> None:
        self._addresses: list[str | None] = [None] * num_shards
        self._entry = (hash_method, token)
        self._restarts: list[Restart] = []
        """The last ones of all shards, even after the book itself was started again."""
        self._is_changed = asyncio.Condition()

    async def entry(self) -> tuple[str, str | None]:
        """How ids are spread, and what servers want to hear."""
        return self._entry

    async def announce(self, shard: int, address: str, restart: Restart | None) -> None:
        """Notes where a shard is, and that it was started again."""
        async with self._is_changed:
            # Shards announce themselves again and again, and a restart counts once.
            if restart is not None and restart not in self._restarts:
                self._restarts.append(restart)
            if self._addresses[shard] != address:
                self._addresses[shard] = address
                self._is_changed.notify_all()

    async def changed(self, known: list[str], patience: float) -> tuple[list[str], list[Restart]] | None:
        """Waits until all shards have addresses, and others than a client knows; None if that takes too long."""

        def is_news() -> bool:
            return None not in self._addresses and self._addresses != known

        async with self._is_changed:
            try:
                await asyncio.wait_for(self._is_changed.wait_for(is_news), patience)
            except (TimeoutError, asyncio.TimeoutError):
                return None
            return [address for address in self._addresses if address is not None], self._restarts


class Shard:
    """The actor that serves one shard. Ray starts it again if it, or its node, ends."""

    def __init__(self, shard: int, settings: ShardSettings, name: str) -> None:
        self._shard, self._settings, self._book = shard, settings, find_book(name)
        self._directory = settings.directory(shard)
        is_restart = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        # Before the start, which makes the files that this looks for.
        restored_from = settings.restored_from(shard)
        self._server = self._start(is_restart)
        address = self._server.address
        self._announcement = (
            shard,
            address,
            Restart(shard, address, time.time(), restored_from) if is_restart else None,
        )
        ray.get(self._book.announce.remote(*self._announcement))
        self._is_over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="recstore-keep", daemon=True)
        self._keeper.start()

    def address(self) -> str:
        """The address at which it is reached."""
        return self._server.address

    def stop(self) -> None:
        """Saves its tables, if it has a directory, and answers no more."""
        self._is_over.set()
        self._keeper.join()
        # With a log the checkpoint comes first, and the log has what is answered after it. Without one it comes last.
        if self._settings.is_logged:
            self._save()
        self._server.stop()
        if not self._settings.is_logged:
            self._save()

    def _start(self, is_restart: bool) -> _native.Server:
        """Starts the server; one that is started again waits for its directory, which its last run may still have."""
        while True:
            try:
                return self._settings.start(self._shard, ray.util.get_node_ip_address())
            except RuntimeError as error:
                if not is_restart:
                    raise
                print(f"shard {self._shard} tries again: {error}", file=sys.stderr, flush=True)
                time.sleep(_RETRY_EVERY)

    def _keep(self) -> None:
        """Announces the shard and saves it, now and then."""
        saved = time.monotonic()
        while not self._is_over.wait(ANNOUNCE_EVERY):
            # Without a wait for the answer: a book that is being started again holds up no checkpoint.
            self._book.announce.remote(*self._announcement)
            if time.monotonic() - saved >= self._settings.checkpoint_every:
                saved = time.monotonic()
                try:
                    self._save()
                except RuntimeError as error:
                    print(f"shard {self._shard}: no checkpoint: {error}", file=sys.stderr, flush=True)

    def _save(self) -> None:
        if self._directory is not None:
            self._server.checkpoint()
