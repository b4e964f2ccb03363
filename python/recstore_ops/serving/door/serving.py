"""The ports of a door, from its start to its end."""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc.aio
from aiohttp import web

from recstore_ops.serving.access import Access, resolved, written
from recstore_ops.serving.bundle import Bundle
from recstore_ops.serving.door.access import grpc_credentials
from recstore_ops.serving.door.connections import Connections
from recstore_ops.serving.door.door import Door
from recstore_ops.serving.door.grpc_service import GrpcDoor
from recstore_ops.serving.door.http import HttpDoor
from recstore_ops.serving.door.settings import DoorSettings

LAST_ANSWERS = 10.0
"""Seconds that requests under way have to be answered when a door ends."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_METRICS_CONNECTIONS = 16
_HANDSHAKE = 5.0
_BACKLOG = 1024
_LAST_BYTES = 1.0

_Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Ports:
    """Where a door listens; port 0 takes any that is free, None listens nowhere.

    Attributes:
        host: of the ports of requests.
        http, grpc: of requests.
        health, metrics: without encryption and token.
    """

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int | None = None
    health: int | None = None
    metrics: int | None = None


@dataclass
class _Listening:
    """What listens, and the line that says so."""

    told: list[str] = field(default_factory=list)
    servers: list[asyncio.Server] = field(default_factory=list)
    connections: list[Connections] = field(default_factory=list)

    def close(self) -> None:
        """Takes no further connections."""
        for server in self.servers:
            server.close()


def serve(bundle: Bundle, name: str, settings: DoorSettings, ports: Ports, access: Access) -> int:
    """Serves a bundle until SIGTERM, SIGINT or SIGHUP, and returns how many requests were left without an answer.

    Prints a line when it listens.

    Raises:
        ValueError: the protocol cannot carry an input or output, other machines reach the address and TLS or the token
            is missing, or a certificate cannot be used.
        OSError: it cannot listen.
    """
    access.check(ports.host, ports.http)
    access.ssl_context()
    door = Door(bundle, name, settings)
    # Torch and the program are hundreds of thousands of objects, and a search for cycles among them takes long.
    gc.collect()
    gc.freeze()
    return asyncio.run(_serve(door, bundle, ports, access))


async def _serve(door: Door, bundle: Bundle, ports: Ports, access: Access) -> int:
    ends = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, ends.set)
    async with AsyncExitStack() as stack:
        listening = _Listening()
        stack.callback(listening.close)
        await _listen(door, listening, ports, access)
        if ports.grpc is not None:
            grpc_server = await _listen_grpc(door, listening, ports.grpc, ports.host, access)
            stack.push_async_callback(grpc_server.stop, _LAST_BYTES)
        print(_line(door, bundle, listening), flush=True)
        await ends.wait()
        door.is_ready = False
        await asyncio.sleep(door.settings.drain)
        listening.close()
        left = await door.answer_the_rest(LAST_ANSWERS)
        for connections in listening.connections:
            await connections.shutdown(0.1)
        return left


async def _listen(door: Door, listening: _Listening, ports: Ports, access: Access) -> None:
    answers = HttpDoor(door, access.token)
    context = access.ssl_context()
    limit = door.settings.max_connections
    connections = Connections(answers.answer, limit, door.metrics)
    door.metrics.gauges["recstore_model_connections"] = ("Open connections over HTTP.", lambda: len(connections))
    address = await _listen_http(listening, connections, ports.host, ports.http, context)
    listening.told.append(f"http{'s' if context else ''}://{address}")
    for title, host, port, answer in (
        ("health", ports.host, ports.health, answers.answer_health),
        ("metrics", door.settings.metrics_host, ports.metrics, answers.answer_metrics),
    ):
        if port is not None:
            others = Connections(answer, _METRICS_CONNECTIONS if title == "metrics" else limit, door.metrics)
            address = await _listen_http(listening, others, host, port, None)
            path = "/metrics" if title == "metrics" else "/v2/health/ready"
            listening.told.append(f"{title} at http://{address}{path}")


async def _listen_http(
    listening: _Listening, connections: Connections, host: str, port: int, context: ssl.SSLContext | None
) -> str:
    """Listens for HTTP and returns the address."""
    address = resolved(host, port)
    handshake = None if context is None else _HANDSHAKE
    try:
        server = await asyncio.get_running_loop().create_server(
            connections, address, port, backlog=_BACKLOG, ssl=context, ssl_handshake_timeout=handshake
        )
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listening.servers.append(server)
    listening.connections.append(connections)
    return written(address, server.sockets[0].getsockname()[1])


async def _listen_grpc(door: Door, listening: _Listening, port: int, host: str, access: Access) -> grpc.aio.Server:
    server = GrpcDoor(door, access.token).server()
    address = resolved(host, port)
    credentials = grpc_credentials(access)
    try:
        if credentials is None:
            bound = server.add_insecure_port(written(address, port))
        else:
            bound = server.add_secure_port(written(address, port), credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from None
    await server.start()
    listening.told.insert(1, f"gRPC at {written(address, bound)}")
    return server


def _line(door: Door, bundle: Bundle, listening: _Listening) -> str:
    """Returns what the start says: addresses, tables, encodings, inputs, outputs, whether requests are joined."""
    tables = ", ".join(
        f"{table.name} ({table.encoding}, {table.rows} rows of {table.dim})" for table in bundle.tables.values()
    )
    signature = door.signature
    joined = (
        f"requests are joined up to {door.settings.max_batch} rows"
        if signature.alone is None
        else f"every request runs alone: {signature.alone}"
    )
    parts = (
        f'model "{door.name}" at {", ".join(listening.told)}',
        f"tables {tables or 'none'}",
        f"inputs {', '.join(map(str, signature.inputs))}",
        f"outputs {', '.join(map(str, signature.outputs))}",
        joined,
    )
    return "; ".join(parts)
