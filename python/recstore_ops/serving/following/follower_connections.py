"""The connections of followers: a bounded number, each of which has to say in time who it is."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from enum import IntEnum

_log = logging.getLogger("recstore_ops.publish")

_MAX_PEERS = 1024
"""The most peers for which the time of the last warning is remembered."""


class State(IntEnum):
    """The state of a connection. If there are too many connections, those in the lowest state are closed first."""

    SILENT = 0
    """It has not said yet who it is."""
    IDLE = 1
    """It has no request under way."""
    BUSY = 2


class Connection:
    """A connection that was accepted.

    Attributes:
        socket: its own; with TLS another than the one that was accepted.
        peer: the address at the other end.
        state: what it does.
        since: when it began to.
    """

    def __init__(self, accepted: socket.socket, peer: str) -> None:
        self.socket, self.peer = accepted, peer
        self.becomes(State.SILENT)

    def becomes(self, state: State) -> None:
        """Notes what it does from now on."""
        self.state, self.since = state, time.monotonic()

    def cut(self) -> None:
        """Ends it, whatever another thread waits for."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Connections:
    """All connections at a time.

    Args:
        limit: how many there may be.

    Attributes:
        refused: how many were refused or closed for bad form, by reason.
    """

    def __init__(self, limit: int) -> None:
        self.refused: Counter[str] = Counter()
        self._limit, self._open = limit, set[Connection]()
        self._warned: dict[str, float] = {}
        self._lock = threading.Lock()

    def admit(self, accepted: socket.socket, peer: str) -> Connection | None:
        """Takes a connection, in the place of the one that has done nothing for longest if there are too many.

        Returns:
            None: all others have requests under way.
        """
        with self._lock:
            if len(self._open) >= self._limit:
                least = min(self._open, key=lambda each: (each.state, each.since))
                if least.state == State.BUSY:
                    return None
                self._open.remove(least)
                least.cut()
            made = Connection(accepted, peer)
            self._open.add(made)
            return made

    def remove(self, connection: Connection) -> None:
        """Forgets a connection that was closed."""
        with self._lock:
            self._open.discard(connection)

    def cut_all(self) -> None:
        """Ends all connections; what is sent over them is cut off."""
        with self._lock:
            for each in self._open:
                each.cut()

    def refuse(self, peer: str, kind: str, reason: str) -> None:
        """Counts a connection that is refused or closed for bad form, with one warning for each peer and second."""
        now = time.monotonic()
        with self._lock:
            self.refused[kind] += 1
            if now - self._warned.get(peer, -math.inf) < 1.0:
                return
            self._warned.pop(peer, None)
            if len(self._warned) >= _MAX_PEERS:
                del self._warned[next(iter(self._warned))]
            self._warned[peer] = now
        _log.warning("the publication's port closes a connection of %s: %s", peer, reason)
