"""Updates that run one after another on a thread of their own, while the caller goes on."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class UpdateQueue:
    """Calls, in order, on one thread that is started with the first of them.

    In a forked child, which has no such thread, a new one is started.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._running: dict[int, Future[Any]] = {}
        self._thread: tuple[int, ThreadPoolExecutor] | None = None

    def issue(self, call: Callable[..., Any], *arguments: Any) -> int:
        """Queues a call and returns its handle."""
        handle = next(self._numbers)
        self._running[handle] = self._executor().submit(call, *arguments)
        return handle

    def wait(self, handle: int) -> None:
        """Waits for a call and raises what it raised.

        Raises:
            ValueError: a handle that is unknown or was waited for.
        """
        call = self._running.pop(handle, None)
        if call is None:
            raise ValueError(f"update handle {handle} is unknown, or was waited for")
        call.result()

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None or self._thread[0] != os.getpid():
            self._thread = os.getpid(), ThreadPoolExecutor(1, "recstore-update")
        return self._thread[1]
