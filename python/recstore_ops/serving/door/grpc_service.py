"""The protocol over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from recstore_ops.serving.door.access import TokenCheck
from recstore_ops.serving.door.bodies import Room, Taken
from recstore_ops.serving.door.door import Door
from recstore_ops.serving.door.grpc_messages import SERVICE, message_class, read_infer_request, written_answer
from recstore_ops.serving.door.http import ARRIVAL
from recstore_ops.serving.door.refusals import Kind, Refusal, invalid

_Answering = Callable[[Any], Awaitable[Any]]

_MOST_STREAMS = 64
_HANDSHAKE_MS = 5_000
_IDLE_MS = 600_000


class GrpcDoor:
    """Answers calls of gRPC.

    Args:
        door: what is served.
        token: what clients must know; None: nothing.
    """

    def __init__(self, door: Door, token: str | None) -> None:
        self._door = door
        self._token = TokenCheck(token, "grpc", door.metrics)
        self._room = Room(door.settings.max_pending_bytes)

    def server(self) -> grpc.aio.Server:
        """Returns a server with the service, without a port."""
        settings = self._door.settings
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # Two servers on one port would be two halves of an error.
                ("grpc.max_receive_message_length", settings.max_body),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", _MOST_STREAMS),
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
            ]
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, self._handlers())])
        return server

    def _handlers(self) -> dict[str, Any]:
        methods: dict[str, tuple[_Answering, bool]] = {
            "ServerLive": (self._server_live, False),
            "ServerReady": (self._server_ready, False),
            "ModelReady": (self._model_ready, True),
            "ServerMetadata": (self._server_metadata, True),
            "ModelMetadata": (self._model_metadata, True),
            "ModelInfer": (self._model_infer, True),
        }
        return {name: self._handler(name, *method) for name, method in methods.items()}

    def _handler(self, name: str, answering: _Answering, needs_token: bool) -> Any:
        """Returns a handler that reads its one message by itself: only when there is room for it."""
        request_class = message_class(f"{name}Request")

        async def read_and_answer(messages: AsyncIterator[bytes]) -> Any:
            with self._room.take(self._door.settings.max_body) as taken:
                return await answering(await _read(messages, request_class, taken))

        async def answer(messages: AsyncIterator[bytes], context: Any) -> Any:
            try:
                if needs_token:
                    self._token.check(_authorization(context))
                if name == "ModelInfer":
                    return await self._door.counted("grpc", lambda: read_and_answer(messages))
                return await read_and_answer(messages)
            except Refusal as refusal:
                code, message = getattr(grpc.StatusCode, refusal.kind.code), str(refusal)
            # Not within `except`: what `abort` raises would hold the refusal, its frames and with them the message.
            await context.abort(code, message)

        return grpc.stream_unary_rpc_method_handler(
            answer, response_serializer=message_class(f"{name}Response").SerializeToString
        )

    async def _server_live(self, _: Any) -> Any:
        return message_class("ServerLiveResponse")(live=True)

    async def _server_ready(self, _: Any) -> Any:
        return message_class("ServerReadyResponse")(ready=self._door.is_ready)

    async def _model_ready(self, request: Any) -> Any:
        self._door.check_model(request.name, request.version)
        return message_class("ModelReadyResponse")(ready=self._door.is_ready)

    async def _server_metadata(self, _: Any) -> Any:
        return message_class("ServerMetadataResponse")(**self._door.server_metadata)

    async def _model_metadata(self, request: Any) -> Any:
        self._door.check_model(request.name, request.version)
        return message_class("ModelMetadataResponse")(**self._door.model_metadata)

    async def _model_infer(self, message: Any) -> Any:
        self._door.check_model(message.model_name, message.model_version)
        request, is_raw = read_infer_request(message)
        outputs = await self._door.infer(request)
        return written_answer(self._door.name, request, is_raw, outputs)


def _authorization(context: Any) -> bytes:
    given = dict(context.invocation_metadata() or ()).get("authorization", "")
    return given.encode() if isinstance(given, str) else given


async def _read(messages: AsyncIterator[bytes], request_class: Any, taken: Taken) -> Any:
    try:
        content = await asyncio.wait_for(anext(messages), ARRIVAL)
    except asyncio.TimeoutError:
        raise Refusal(Kind.SLOW, f"the message did not arrive within {ARRIVAL:g} s") from None
    except StopAsyncIteration:
        raise invalid("the call has no message") from None
    taken.shrink(len(content))
    try:
        return request_class.FromString(content)
    except DecodeError as error:
        raise invalid(f"the message cannot be read: {error}") from None
