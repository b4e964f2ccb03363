"""Requests of all ports, each answered by a task of the event loop."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable

from recstore_ops import _native
from recstore_ops.serving.server.requests import Answer, Request

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
