"""Connections over HTTP: a bounded number, each of which says something in time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from recstore_ops.serving.door.metrics import Metrics

FIRST_REQUEST = 5.0
"""Seconds until a new connection has sent the head of a request, encryption included."""
IDLE = 600.0
"""Seconds after which a connection without requests is closed."""

_LINGERING = 2.0

_quiet = logging.getLogger("recstore_ops.serving.door")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False

_FULL_BODY = json.dumps({"error": "there are too many connections: try again later"}).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_FULL_BODY), _FULL_BODY)
)


class _Full(asyncio.Protocol):
    """A connection beyond the limit: it is refused at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_FULL)
        transport.close()


class Connections(web.Server):
    """Makes the protocols of a listening socket.

    Args:
        answer: what a request gets.
        limit: connections at a time.
        metrics: where refused ones are counted.
    """

    def __init__(
        self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limit: int, metrics: Metrics
    ) -> None:
        super().__init__(
            self._answer,
            handler_cancellation=True,
            keepalive_timeout=IDLE,
            lingering_time=_LINGERING,
            auto_decompress=False,
            access_log=None,
            logger=_quiet,
        )
        self._give = answer
        self._limit = limit
        self._metrics = metrics
        self._silent: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._open: set[RequestHandler] = set()

    def __len__(self) -> int:
        """Connections that are open, or on their way to be."""
        return len(self._open | self._silent.keys())

    def __call__(self) -> Any:
        """Makes the protocol of a connection that was accepted; with TLS it is not yet encrypted."""
        if len(self) >= self._limit:
            self._metrics.refused_connections["limit"] += 1
            return _Full()
        handler = super().__call__()
        self._silent[handler] = asyncio.get_running_loop().call_later(FIRST_REQUEST, self._close_silent, handler)
        return handler

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Counts a connection."""
        self._open.add(handler)
        super().connection_made(handler, transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forgets a connection."""
        self._open.discard(handler)
        self._spoke(handler)
        super().connection_lost(handler, exc)

    def _spoke(self, handler: RequestHandler) -> None:
        timer = self._silent.pop(handler, None)
        if timer is not None:
            timer.cancel()

    def _close_silent(self, handler: RequestHandler) -> None:
        self._silent.pop(handler, None)
        self._metrics.refused_connections["silent"] += 1
        handler.force_close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self._spoke(request.protocol)
        return await self._give(request)
