"""The ports of a model server, from its start to its end."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from recstore_ops import _native
from recstore_ops.serving.access import Access, resolved, written
from recstore_ops.serving.bundle import Bundle
from recstore_ops.serving.server.grpc_service import GrpcService
from recstore_ops.serving.server.http import HttpService
from recstore_ops.serving.server.model_server import ModelServer
from recstore_ops.serving.server.requests import Answer, Request
from recstore_ops.serving.server.settings import ModelServerSettings

AnswerRequest = Callable[[Request], Awaitable[Answer]]

_FAILED = Answer(
    500, b'{"error": "the server failed; its error stream says why"}', {"Content-Type": "application/json"}
)


class Answering:
    """Takes requests from ports and gives their answers; the ports themselves answer health.

    Args:
        front: the ports.
        answer: what answers a request.
    """

    def __init__(self, front: _native.Front, answer: AnswerRequest) -> None:
        self._front = front
        self._answer = answer
        # Also what keeps them alive: the event loop has only weak references to tasks.
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self) -> None:
        """Begins to answer what has come, and no longer answers clients that have gone."""
        for number, asked in self._front.take():
            if asked is not None:
                self._tasks[number] = asyncio.ensure_future(self._give(number, Request(*asked)))
            elif (task := self._tasks.get(number)) is not None:
                task.cancel()

    async def _give(self, number: int, request: Request) -> None:
        try:
            answer = await self._answer(request)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            answer = _FAILED
        finally:
            del self._tasks[number]
        self._front.answer(number, answer.status, list(answer.headers.items()), answer.body)


HANDSHAKE = 5.0
"""Seconds until the peer of a new connection has sent a request, encryption included."""
IDLE = 600.0
"""Seconds after which a connection without requests is closed."""
ARRIVAL = 60.0
"""Seconds within which a request arrives, and within which its answer is accepted."""
LAST_ANSWERS = 10.0
"""Seconds that requests under way have to be answered when a model server ends."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LAST_BYTES = 1.0


@dataclass(frozen=True)
class Ports:
    """The ports of a model server. Port 0 takes any free one, None opens none.

    Attributes:
        host: the address of the ports for requests.
        http, grpc: the ports for requests.
        health, metrics: ports without encryption and token.
    """

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int | None = None
    health: int | None = None
    metrics: int | None = None


def serve(bundle: Bundle, name: str, settings: ModelServerSettings, ports: Ports, access: Access) -> int:
    """Serves a bundle until SIGTERM, SIGINT or SIGHUP, and returns how many requests were left without an answer.

    Prints a line when it listens.

    Raises:
        ValueError: the protocol cannot carry an input or output, other machines reach the address and TLS or the token
            is missing, or a certificate cannot be used.
        OSError: it cannot listen.
    """
    access.check(ports.host, ports.http)
    # Called for its errors alone, before the model is prepared: the ports get the files themselves.
    access.ssl_context()
    server = ModelServer(bundle, name, settings)
    # Torch and the program are hundreds of thousands of objects, and a search for cycles among them takes long.
    gc.collect()
    gc.freeze()
    log = _native.log_to_stderr(settings.log_level.value)
    try:
        _native.raise_descriptor_limit()
        return asyncio.run(_serve(server, bundle, ports, access))
    finally:
        log.end()


async def _serve(server: ModelServer, bundle: Bundle, ports: Ports, access: Access) -> int:
    ends = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, ends.set)
    front = opened(server, access)
    try:
        listening = _listen(front, ports, server.settings.metrics_host, has_tls=access.tls is not None)
        print(_line(server, bundle, listening), flush=True)
        await ends.wait()
        server.is_ready = False
        # Health says so first, and requests are answered for `drain` seconds more: load balancers need time to notice.
        front.set_ready(False)
        await asyncio.sleep(server.settings.drain)
        return await server.answer_the_rest(LAST_ANSWERS)
    finally:
        loop.remove_reader(front.fileno())
        await asyncio.to_thread(front.stop, _LAST_BYTES)


def opened(
    server: ModelServer, access: Access, *, handshake: float = HANDSHAKE, arrival: float = ARRIVAL
) -> _native.Front:
    """Returns ports whose requests the running event loop answers; none is open yet.

    Args:
        server: what is served.
        access: who is let in.
        handshake: seconds until the peer of a new connection has sent a request.
        arrival: seconds within which a request arrives, and within which its answer is accepted.
    """
    settings = server.settings
    front = _native.Front(
        max_connections=settings.max_connections,
        max_body=settings.max_body,
        max_pending_bytes=settings.max_pending_bytes,
        token=access.token,
        tls=access.tls,
        handshake_timeout=handshake,
        idle_timeout=IDLE,
        transfer_timeout=arrival,
    )
    over_http, over_grpc = HttpService(server), GrpcService(server)

    async def answer(request: Request) -> Answer:
        return await (over_grpc if request.port == "grpc" else over_http).answer(request)

    server.metrics.ports = front.counts
    asyncio.get_running_loop().add_reader(front.fileno(), Answering(front, answer).take)
    return front


def _listen(front: _native.Front, ports: Ports, metrics_host: str, *, has_tls: bool) -> list[str]:
    """Opens the ports, and returns what the start says of each.

    Raises:
        OSError: it cannot listen.
    """
    scheme = "https" if has_tls else "http"
    told = [f"{scheme}://{_listen_at(front, 'http', ports.host, ports.http)}"]
    if ports.grpc is not None:
        told.append(f"gRPC at {_listen_at(front, 'grpc', ports.host, ports.grpc)}")
    if ports.health is not None:
        told.append(f"health at http://{_listen_at(front, 'health', ports.host, ports.health)}/v2/health/ready")
    if ports.metrics is not None:
        told.append(f"metrics at http://{_listen_at(front, 'metrics', metrics_host, ports.metrics)}/metrics")
    return told


def _listen_at(front: _native.Front, kind: str, host: str, port: int) -> str:
    address = resolved(host, port)
    try:
        return written(address, front.listen(kind, address, port))
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def _line(server: ModelServer, bundle: Bundle, listening: list[str]) -> str:
    """Returns what the start says: addresses, tables, encodings, inputs, outputs, whether requests are joined."""
    tables = ", ".join(
        f"{table.name} ({table.encoding}, {table.rows} rows of {table.dim})" for table in bundle.tables.values()
    )
    signature = server.signature
    joined = (
        f"requests are joined up to {server.settings.max_batch} rows"
        if signature.alone is None
        else f"every request runs alone: {signature.alone}"
    )
    parts = (
        f'model "{server.name}" at {", ".join(listening)}',
        f"tables {tables or 'none'}",
        f"inputs {', '.join(map(str, signature.inputs))}",
        f"outputs {', '.join(map(str, signature.outputs))}",
        joined,
    )
    return "; ".join(parts)
