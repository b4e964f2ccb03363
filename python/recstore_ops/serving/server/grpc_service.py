"""The protocol over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from recstore_ops.serving.server.grpc_messages import message_class, read_infer_request, written_answer
from recstore_ops.serving.server.model_server import ModelServer
from recstore_ops.serving.server.refusals import Refusal, invalid
from recstore_ops.serving.server.requests import Answer, Request


class GrpcService:
    """Answers calls of gRPC whose token has been compared; their port answers health.

    Args:
        server: what is served.
    """

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._methods: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }

    async def answer(self, request: Request) -> Answer:
        """Answers a call."""
        try:
            if request.method == "ModelInfer":
                answer = await self._server.counted("grpc", lambda: self._answered(request))
            else:
                answer = await self._answered(request)
        except Refusal as refusal:
            return Answer(refusal.kind.code, str(refusal).encode())
        return Answer(0, answer.SerializeToString())

    async def _answered(self, request: Request) -> Any:
        message = message_class(f"{request.method}Request")
        try:
            read = message.FromString(request.content())
        except DecodeError as error:
            raise invalid(f"the message cannot be read: {error}") from None
        return await self._methods[request.method](read)

    async def _model_ready(self, request: Any) -> Any:
        self._server.check_model(request.name, request.version)
        return message_class("ModelReadyResponse")(ready=self._server.is_ready)

    async def _server_metadata(self, _: Any) -> Any:
        return message_class("ServerMetadataResponse")(**self._server.server_metadata)

    async def _model_metadata(self, request: Any) -> Any:
        self._server.check_model(request.name, request.version)
        return message_class("ModelMetadataResponse")(**self._server.model_metadata)

    async def _model_infer(self, message: Any) -> Any:
        self._server.check_model(message.model_name, message.model_version)
        request, is_raw = read_infer_request(message)
        outputs = await self._server.infer(request)
        return written_answer(self._server.name, request, is_raw, outputs)
