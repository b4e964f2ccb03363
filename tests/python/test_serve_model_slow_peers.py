"""Clients of `recstore serve-model` that send or read too slowly, or hold memory, in a process with shorter limits."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from served_models import binary_body
from torch import Tensor, nn

from recstore_ops.serving import export, load_bundle
from recstore_ops.serving.access import Access
from recstore_ops.serving.server import serving
from recstore_ops.serving.server.grpc_service import SERVICE, message_class
from recstore_ops.serving.server.model_server import ModelServer
from recstore_ops.serving.server.settings import ModelServerSettings

pytestmark = pytest.mark.tier("all")

LARGE: dict[str, Any] = {"max_body": 64 << 20, "max_pending_bytes": 64 << 20, "max_elements": 1 << 24}


class Doubled(nn.Module):
    """Twice its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [B, 2] of [B, 2]."""
        return x * 2


@pytest.fixture
def server(tmp_path: Path) -> ModelServer:
    """A server with much room."""
    bundle = load_bundle(export(Doubled(), (torch.rand(3, 2),), tmp_path / "model"))
    return ModelServer(bundle, "model", ModelServerSettings(**LARGE))


def over(server: ModelServer, port: str, task: Callable[[int], Awaitable[Any]], token: str | None = None) -> Any:
    """Runs a task beside a port whose peers have 0.3 s, given its number."""

    async def main() -> Any:
        front = serving.opened(server, Access(token), arrival=0.3)
        try:
            return await task(front.listen(port, "127.0.0.1", 0))
        finally:
            asyncio.get_running_loop().remove_reader(front.fileno())
            front.stop(0.0)

    return asyncio.run(main())


def refused(server: ModelServer, port: str, reason: str) -> int:
    """How many peers a port refused or closed for a reason."""
    return next(dict(counts)[reason] for name, _, counts in server.metrics.ports() if name == port)


def head(size: int, further: str = "") -> bytes:
    """The head of a request."""
    return f"POST /v2/models/model/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n{further}\r\n".encode()


def test_a_body_that_does_not_arrive(server: ModelServer) -> None:
    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(100) + b"{")
        answered = await reader.read()
        writer.close()
        return answered

    first, _, body = over(server, "http", ask).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body) == {"error": "the request did not arrive within 0.3 s"}
    assert server.metrics.requests == {("http", "slow"): 1}


def test_a_body_that_is_cut_off(server: ModelServer) -> None:
    async def ask(port: int) -> None:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(8 << 20) + bytes(5 << 20))
            await writer.drain()
            writer.close()
        # If their room were not given back there would be none for this one.
        begin, answered = time.monotonic(), b""
        while not answered.startswith(b"HTTP/1.1 400 "):
            assert time.monotonic() - begin < 20, answered
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(8 << 20) + bytes(8 << 20))
            with suppress(ConnectionError):
                answered = await reader.readline()
            writer.close()

    over(server, "http", ask)
    assert not server.in_flight


def test_a_body_in_chunks_that_are_none(server: ModelServer) -> None:
    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v2/models/model/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"no number\r\n")
        answered = await reader.read()
        writer.close()
        return answered

    assert over(server, "http", ask).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))


def test_an_answer_that_is_not_read(server: ModelServer) -> None:
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
            begin = time.monotonic()
            while not refused(server, "http", "slow"):
                await asyncio.sleep(0.01)
                assert time.monotonic() - begin < 20

    over(server, "http", ask)
    assert server.metrics.requests == {("http", "ok"): 1}


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code().name, error.value.details() or ""


LIVE = message_class("ServerLiveResponse").FromString


def test_messages_that_do_not_arrive_take_no_room_and_not_for_long(server: ModelServer) -> None:
    async def ask(port: int) -> list[Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            silent = [channel.stream_unary(f"/{SERVICE}/ModelInfer")() for _ in range(60)]
            await silent[0].wait_for_connection()
            live = await channel.unary_unary(f"/{SERVICE}/ServerLive", response_deserializer=LIVE)(b"")
            return [live.live, {await refusal(call) for call in silent}]

    slow = {("DEADLINE_EXCEEDED", "the request did not arrive within 0.3 s")}
    assert over(server, "grpc", ask) == [True, slow]
    assert server.metrics.requests == {("grpc", "slow"): 60}


def test_calls_without_the_token_are_refused_before_their_messages(server: ModelServer) -> None:
    async def ask(port: int) -> list[Any]:
        found = set()
        for _ in range(5):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                silent = [channel.stream_unary(f"/{SERVICE}/ModelInfer")() for _ in range(64)]
                found |= {await refusal(call) for call in silent}
                live = await channel.unary_unary(f"/{SERVICE}/ServerLive", response_deserializer=LIVE)(b"")
                assert live.live
        return sorted(found)

    assert over(server, "grpc", ask, "a secret") == [("UNAUTHENTICATED", "the token is not the server's")]
    assert refused(server, "grpc", "token") == 320
    assert not server.metrics.requests


def test_messages_beyond_the_limit_are_refused(server: ModelServer) -> None:
    async def ask(port: int) -> tuple[str, str]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return await refusal(channel.unary_unary(f"/{SERVICE}/ModelInfer")(bytes((64 << 20) + 1)))

    most = 64 << 20
    assert over(server, "grpc", ask) == (
        "RESOURCE_EXHAUSTED",
        f"the message has {most + 1} bytes, at most {most} are taken",
    )
    assert server.metrics.requests == {("grpc", "too_large"): 1}
