"""Clients of `recstore serve-model` that send or read too slowly, or hold memory, in a process with shorter limits."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from served_models import binary_body
from torch import Tensor, nn

from recstore_ops.serving import export, load_bundle
from recstore_ops.serving.door import grpc_service, http
from recstore_ops.serving.door.connections import Connections
from recstore_ops.serving.door.door import Door
from recstore_ops.serving.door.grpc_messages import SERVICE, message_class
from recstore_ops.serving.door.settings import DoorSettings

pytestmark = pytest.mark.tier("all")

LARGE: dict[str, Any] = {"max_body": 64 << 20, "max_pending_bytes": 64 << 20, "max_elements": 1 << 24}


class Doubled(nn.Module):
    """Twice its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [B, 2] of [B, 2]."""
        return x * 2


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http, grpc_service):
        monkeypatch.setattr(module, "ARRIVAL", 0.3)


@pytest.fixture
def door(tmp_path: Path) -> Door:
    """A door with much room."""
    bundle = load_bundle(export(Doubled(), (torch.rand(3, 2),), tmp_path / "model"))
    return Door(bundle, "model", DoorSettings(**LARGE))


def over_http(door: Door, task: Callable[[int], Awaitable[Any]]) -> Any:
    """Runs a task beside a server, given its port."""

    async def main() -> Any:
        connections = Connections(http.HttpDoor(door, None).answer, 10, door.metrics)
        server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
        try:
            return await task(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            await connections.shutdown(0.1)

    return asyncio.run(main())


def head(size: int, further: str = "") -> bytes:
    """The head of a request."""
    return f"POST /v2/models/model/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n{further}\r\n".encode()


def test_a_body_that_does_not_arrive(door: Door) -> None:
    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(100) + b"{")
        answered = await reader.read()
        writer.close()
        return answered

    first, _, body = over_http(door, ask).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body) == {"error": "the body did not arrive within 0.3 s"}
    assert door.metrics.requests == {("http", "slow"): 1}


def test_a_body_that_is_cut_off(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[str] = []
    monkeypatch.setattr(http, "written_error", lambda refusal: refusals.append(str(refusal)) or b"")

    async def ask(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(100) + b"{")
        await asyncio.sleep(0.05)
        writer.close()
        while door.in_flight or not door.metrics.requests:
            await asyncio.sleep(0.01)

    over_http(door, ask)
    assert set(door.metrics.requests) <= {("http", "invalid"), ("http", "cancelled")}
    assert all(refusal.startswith("the body is cut off: ") for refusal in refusals)


def test_a_body_in_chunks_that_are_none(door: Door) -> None:
    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v2/models/model/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"no number\r\n")
        answered = await reader.read()
        writer.close()
        return answered

    assert over_http(door, ask).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))


def test_an_answer_that_is_not_read(door: Door) -> None:
    body, headers = binary_body(("x", "FP32", torch.zeros(1, 2)), all_binary=True)
    entry = {"name": "x", "datatype": "FP32", "shape": [4_000_000, 2], "parameters": {"binary_data_size": 32_000_000}}
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    body, headers = header + bytes(32_000_000), {**headers, "Inference-Header-Content-Length": str(len(header))}

    async def ask(port: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            await loop.sock_connect(peer, ("127.0.0.1", port))
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            await loop.sock_sendall(peer, head(len(body), lines) + body)
            while not door.metrics.requests:
                await asyncio.sleep(0.01)

    over_http(door, ask)
    assert door.metrics.requests == {("http", "slow"): 1}


async def over_grpc(door: Door, task: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> Any:
    """Runs a task beside a server, given a channel to it."""
    server = grpc_service.GrpcDoor(door, None).server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return await task(channel)
    finally:
        await server.stop(None)


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code().name, error.value.details() or ""


def test_a_message_that_does_not_arrive_holds_memory_for_a_while(door: Door) -> None:
    live = message_class("ServerLiveResponse").FromString

    async def ask(channel: grpc.aio.Channel) -> list[Any]:
        silent = channel.stream_unary(f"/{SERVICE}/ModelInfer")()
        await silent.wait_for_connection()
        while not door.in_flight:
            await asyncio.sleep(0.001)
        asking = channel.unary_unary(f"/{SERVICE}/ServerLive", response_deserializer=live)
        busy = await refusal(asking(b""))
        slow = await refusal(silent)
        return [busy, slow, await asking(b"")]

    busy, slow, answered = asyncio.run(over_grpc(door, ask))
    assert busy == ("RESOURCE_EXHAUSTED", "the requests under way take all memory for requests: try again later")
    assert slow == ("DEADLINE_EXCEEDED", "the message did not arrive within 0.3 s")
    assert answered.live


def test_messages_beyond_the_limit_are_refused(door: Door) -> None:
    async def ask(channel: grpc.aio.Channel) -> tuple[str, str]:
        return await refusal(channel.unary_unary(f"/{SERVICE}/ModelInfer")(bytes((64 << 20) + 1)))

    assert asyncio.run(over_grpc(door, ask))[0] == "RESOURCE_EXHAUSTED"
    assert door.metrics.requests == {("grpc", "invalid"): 1}
