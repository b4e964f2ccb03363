"""The protocol over HTTP: paths, statuses, bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from aiohttp.client_exceptions import ClientError
from aiohttp.http_exceptions import HttpProcessingError

from recstore_ops.serving.door.access import TokenCheck
from recstore_ops.serving.door.bodies import Room, Taken
from recstore_ops.serving.door.door import Door
from recstore_ops.serving.door.http_messages import (
    HEADER_LENGTH,
    check_asked,
    read_infer_request,
    written_answer,
    written_error,
)
from recstore_ops.serving.door.refusals import Kind, Refusal, invalid, quoted

ARRIVAL = 60.0
"""Seconds within which a request's body arrives, and within which its answer is accepted."""

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4"


class HttpDoor:
    """Answers HTTP requests.

    Args:
        door: what is served.
        token: what clients must know; None: nothing.
    """

    def __init__(self, door: Door, token: str | None) -> None:
        self._door = door
        self._token = TokenCheck(token, "http", door.metrics)
        self._room = Room(door.settings.max_pending_bytes)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers on the main port; health alone needs no token."""
        parts = request.path.strip("/").split("/")
        try:
            if parts[:2] == ["v2", "health"]:
                return self._health(request, parts)
            self._token.check(request.headers.get("Authorization", "").encode("utf-8", "surrogateescape"))
            if parts == ["metrics"]:
                return self._metrics(request)
            if parts == ["v2"]:
                return _get(request, self._door.server_metadata)
            if parts[:2] == ["v2", "models"] and len(parts) > 2:
                return await self._model(request, parts[2], parts[3:])
            raise _no_path(request)
        except Refusal as refusal:
            return _refused(refusal)

    async def answer_health(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers on a port of health alone."""
        try:
            return self._health(request, request.path.strip("/").split("/"))
        except Refusal as refusal:
            return _refused(refusal)

    async def answer_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers on a port of metrics alone."""
        try:
            if request.path != "/metrics":
                raise _no_path(request)
            return self._metrics(request)
        except Refusal as refusal:
            return _refused(refusal)

    def _health(self, request: web.BaseRequest, parts: Sequence[str]) -> web.Response:
        if parts == ["v2", "health", "live"]:
            return _get(request, {"live": True})
        if parts == ["v2", "health", "ready"]:
            return _get(request, {"ready": self._door.is_ready}, 200 if self._door.is_ready else 503)
        raise _no_path(request)

    def _metrics(self, request: web.BaseRequest) -> web.Response:
        _check_method(request, "GET")
        headers = {"Content-Type": _PROMETHEUS}
        return web.Response(body=self._door.metrics.text().encode(), headers=headers)

    async def _model(self, request: web.BaseRequest, name: str, rest: Sequence[str]) -> web.StreamResponse:
        version = ""
        if rest[:1] == ["versions"] and len(rest) > 1:
            version, rest = rest[1], rest[2:]
        if rest not in ([], ["ready"], ["infer"]):
            raise _no_path(request)
        if rest == ["infer"]:
            return await self._door.counted("http", lambda: self._infer(request, name, version))
        self._door.check_model(name, version)
        if rest == ["ready"]:
            ready = {"name": self._door.name, "ready": self._door.is_ready}
            return _get(request, ready, 200 if self._door.is_ready else 503)
        return _get(request, self._door.model_metadata)

    async def _infer(self, request: web.BaseRequest, name: str, version: str) -> web.StreamResponse:
        _check_method(request, "POST")
        self._door.check_model(name, version)
        with self._room.take(self._expected_size(request)) as taken:
            body = await self._body(request, taken)
            length, most = request.headers.get(HEADER_LENGTH), self._door.settings.max_elements
            asked = read_infer_request(memoryview(body), length, self._door.name, most)
            check_asked(asked, self._door.signature.outputs)
            outputs = await self._door.infer(asked.request)
            answer, header = written_answer(self._door.name, asked, outputs)
            headers = {"Content-Type": _JSON}
            if header is not None:
                headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(header)}
            response = web.Response(body=answer, headers=headers)
            await _send(request, response)
            return response

    def _expected_size(self, request: web.BaseRequest) -> int:
        """Returns how many bytes a body has at most; only then is any of it read."""
        if encoding := request.headers.get("Content-Encoding"):
            raise Refusal(Kind.ENCODING, f"bodies are taken as they are, not in Content-Encoding {quoted(encoding)}")
        size, most = request.content_length, self._door.settings.max_body
        if size is None:
            return most
        if size > most:
            raise Refusal(Kind.TOO_LARGE, f"the body has {size} bytes, at most {most} are taken")
        return size

    async def _body(self, request: web.BaseRequest, taken: Taken) -> bytearray:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            body = await asyncio.wait_for(self._read(request), ARRIVAL)
        except asyncio.TimeoutError:
            raise Refusal(Kind.SLOW, f"the body did not arrive within {ARRIVAL:g} s") from None
        except (ClientError, HttpProcessingError, web.RequestPayloadError, ConnectionError) as error:
            raise invalid(f"the body is cut off: {error}") from None
        taken.shrink(len(body))
        return body

    async def _read(self, request: web.BaseRequest) -> bytearray:
        body, most = bytearray(), self._door.settings.max_body
        while block := await request.content.readany():
            body += block
            if len(body) > most:
                raise Refusal(Kind.TOO_LARGE, f"the body has more than {most} bytes, at most {most} are taken")
        return body


async def _send(request: web.BaseRequest, response: web.Response) -> None:
    """Sends an answer; a client that does not take it loses its connection."""

    async def send() -> None:
        await response.prepare(request)
        await response.write_eof()

    try:
        await asyncio.wait_for(send(), ARRIVAL)
    except asyncio.TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise Refusal(Kind.SLOW, f"the answer was not accepted within {ARRIVAL:g} s") from None
    except ConnectionError:  # Nothing can be said to a client that has gone.
        return


def _get(request: web.BaseRequest, document: dict[str, Any], status: int = 200) -> web.Response:
    _check_method(request, "GET")
    return web.Response(body=json.dumps(document).encode(), status=status, content_type=_JSON)


def _check_method(request: web.BaseRequest, method: str) -> None:
    if request.method != method and not (method == "GET" and request.method == "HEAD"):
        raise Refusal(Kind.METHOD, f"{request.path} takes {method}, got {quoted(request.method)}", method)


def _no_path(request: web.BaseRequest) -> Refusal:
    return Refusal(Kind.UNKNOWN, f"there is no path {quoted(request.path)}")


def _refused(refusal: Refusal) -> web.Response:
    headers = {}
    if refusal.kind in (Kind.BUSY, Kind.ENDING):
        headers["Retry-After"] = "1"
    elif refusal.kind is Kind.TOKEN:
        headers["WWW-Authenticate"] = "Bearer"
    elif refusal.kind is Kind.METHOD:
        headers["Allow"] = refusal.allowed
    response = web.Response(
        body=written_error(refusal), status=refusal.kind.status, content_type=_JSON, headers=headers
    )
    if refusal.kind in (Kind.TOO_LARGE, Kind.SLOW, Kind.ENDING):
        response.force_close()
    return response
