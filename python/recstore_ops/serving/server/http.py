"""The protocol over HTTP: paths, statuses, bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from recstore_ops.serving.server.http_messages import (
    HEADER_LENGTH,
    check_asked,
    read_infer_request,
    written_answer,
    written_error,
)
from recstore_ops.serving.server.model_server import ModelServer
from recstore_ops.serving.server.refusals import Kind, Refusal, quoted
from recstore_ops.serving.server.requests import Answer, Request

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4"


class HttpService:
    """Answers HTTP requests whose token has been compared; their ports answer health.

    Args:
        server: what is served.
    """

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    async def answer(self, request: Request) -> Answer:
        """Answers a request at one of the ports."""
        path = unquote(request.path)
        try:
            return await self._routed(request, path, path.strip("/").split("/"))
        except Refusal as refusal:
            return _refused(refusal)

    async def _routed(self, request: Request, path: str, parts: Sequence[str]) -> Answer:
        if request.port != "metrics" and parts in (["v2", "health", "live"], ["v2", "health", "ready"]):
            _check_method(request, path, "GET")  # With that method the port has answered.
        if request.port != "health" and parts == ["metrics"]:
            _check_method(request, path, "GET")
            return Answer(200, self._server.metrics.text().encode(), {"Content-Type": _PROMETHEUS})
        if request.port == "http":
            if parts == ["v2"]:
                return _get(request, path, self._server.server_metadata)
            if parts[:2] == ["v2", "models"] and len(parts) > 2:
                return await self._model(request, path, parts[2], parts[3:])
        raise _no_path(path)

    async def _model(self, request: Request, path: str, name: str, rest: Sequence[str]) -> Answer:
        version = ""
        if rest[:1] == ["versions"] and len(rest) > 1:
            version, rest = rest[1], rest[2:]
        if rest not in ([], ["ready"], ["infer"]):
            raise _no_path(path)
        if rest == ["infer"]:
            return await self._server.counted("http", lambda: self._infer(request, path, name, version))
        self._server.check_model(name, version)
        if rest == ["ready"]:
            ready = {"name": self._server.name, "ready": self._server.is_ready}
            return _get(request, path, ready, 200 if self._server.is_ready else 503)
        return _get(request, path, self._server.model_metadata)

    async def _infer(self, request: Request, path: str, name: str, version: str) -> Answer:
        _check_method(request, path, "POST")
        self._server.check_model(name, version)
        if (encoding := _header(request, "Content-Encoding")) and encoding.lower() != "identity":
            raise Refusal(Kind.ENCODING, f"bodies are taken as they are, not in Content-Encoding {quoted(encoding)}")
        length, most = _header(request, HEADER_LENGTH), self._server.settings.max_elements
        asked = read_infer_request(memoryview(request.content()), length, self._server.name, most)
        check_asked(asked, self._server.signature.outputs)
        outputs = await self._server.infer(asked.request)
        answer, header = written_answer(self._server.name, asked, outputs)
        if header is None:
            return Answer(200, answer, {"Content-Type": _JSON})
        return Answer(200, answer, {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(header)})


def _header(request: Request, name: str) -> str | None:
    value = request.headers.get(name.lower())
    return None if value is None else value.decode("utf-8", "replace")


def _get(request: Request, path: str, document: dict[str, Any], status: int = 200) -> Answer:
    _check_method(request, path, "GET")
    return Answer(status, json.dumps(document).encode(), {"Content-Type": _JSON})


def _check_method(request: Request, path: str, method: str) -> None:
    if request.method != method and not (method == "GET" and request.method == "HEAD"):
        raise Refusal(Kind.METHOD, f"{path} takes {method}, got {quoted(request.method)}", method)


def _no_path(path: str) -> Refusal:
    return Refusal(Kind.UNKNOWN, f"there is no path {quoted(path)}")


def _refused(refusal: Refusal) -> Answer:
    headers = {"Content-Type": _JSON}
    if refusal.kind in (Kind.BUSY, Kind.ENDING):
        headers["Retry-After"] = "1"
    elif refusal.kind is Kind.METHOD:
        headers["Allow"] = refusal.allowed
    if refusal.kind in (Kind.TOO_LARGE, Kind.SLOW, Kind.ENDING):
        headers["Connection"] = "close"
    return Answer(refusal.kind.status, written_error(refusal), headers)
