"""Requests that are issued now and carried out by a thread of their own: by priority, bounded, and with no error lost.

The same rules as those of `AsyncStore` in the Rust crate `recstore-ps`, but in Python: rows and gradients reach the
store through the operators only, which let go of the GIL while they work, and the stable ABI of Python 3.10 has no
buffers by which they could go past them without a copy.
"""

from __future__ import annotations

import heapq
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from torch import Tensor


@dataclass(frozen=True)
class KVResponse:
    """What a callback gets of the request that it belongs to.

    Attributes:
        timestamp: the request's.
        rows: what a pull gives, float32 `[n, dim]`; `None` of a push and of a request that failed.
        error: why it failed, else `None`.
    """

    __module__ = "recstore_ops"

    timestamp: int
    rows: Tensor | None = None
    error: BaseException | None = None


Callback = Callable[[KVResponse], object]


@dataclass(frozen=True)
class Request:
    """What a request does, and the bytes that it takes until then."""

    call: Callable[[], Tensor | None]
    changes: bool
    num_bytes: int
    callback: Callback | None = None


@dataclass
class Limits:
    """How much may be pending, and how many seconds a caller waits for room."""

    max_pending: int = 1024
    max_pending_bytes: int = 256 << 20
    issue_timeout: float = 60.0


@dataclass
class _State:
    """What callers and the thread share; all of it is guarded by `changed`."""

    limits: Limits
    changed: threading.Condition = field(default_factory=threading.Condition)
    num_issued: int = 0
    waiting: dict[int, Request] = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)
    """A heap of (-priority, timestamp); those that were taken are still in it."""
    pushes: deque[int] = field(default_factory=deque)
    """The timestamps of pushes that wait, as they were issued."""
    unfinished: set[int] = field(default_factory=set)
    num_bytes: int = 0
    """The bytes of requests that are not finished, and of rows that were not taken."""
    rows: dict[int, Tensor] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)
    """Kept, so that a wait gives the same answer whenever it comes."""
    untold: dict[int, BaseException] = field(default_factory=dict)
    is_closed: bool = False

    def full(self, num_bytes: int) -> str | None:
        """Says which limit leaves no room for a request, if one does."""
        limits, pending = self.limits, len(self.unfinished)
        if pending >= limits.max_pending:
            return f"max_pending is {limits.max_pending}, of which {pending} are pending: no room for 1 more"
        if self.num_bytes + num_bytes > limits.max_pending_bytes:
            in_use = f"max_pending_bytes is {limits.max_pending_bytes}, of which {self.num_bytes} are pending"
            return f"{in_use}: no room for {num_bytes} more"
        return None

    def add(self, request: Request, priority: int) -> int:
        timestamp = self.num_issued
        self.num_issued += 1
        self.waiting[timestamp] = request
        heapq.heappush(self.order, (-priority, timestamp))
        if request.changes:
            self.pushes.append(timestamp)
        self.unfinished.add(timestamp)
        self.num_bytes += request.num_bytes
        self.changed.notify_all()
        return timestamp

    def take_next(self) -> tuple[int, Request] | None:
        """Takes the request that comes next. A push of a higher priority takes the pushes before it along."""
        while self.order and self.order[0][1] not in self.waiting:
            heapq.heappop(self.order)
        if not self.order:
            return None
        timestamp = self.order[0][1]
        if self.waiting[timestamp].changes:
            timestamp = self.pushes.popleft()
        return timestamp, self.waiting.pop(timestamp)

    def finish(
        self, timestamp: int, request: Request, rows: Tensor | None, error: BaseException | None, is_told: bool
    ) -> None:
        self.num_bytes -= request.num_bytes
        self.unfinished.discard(timestamp)
        if rows is not None:
            self.rows[timestamp] = rows
            self.num_bytes += rows.nbytes
        if error is not None:
            self.failures[timestamp] = error
            if not is_told:
                self.untold[timestamp] = error
        self.changed.notify_all()

    def raise_untold(self) -> None:
        """Raises what requests failed with of which nobody was told."""
        untold = list(self.untold.values())
        self.untold.clear()
        if len(untold) == 1:
            raise untold[0]
        if untold:
            raise RuntimeError(f"{untold[0]} (and {len(untold) - 1} more requests failed)") from untold[0]


class RequestQueue:
    """Requests on one table, carried out by one thread, one after another.

    Those of a higher priority come first, and of one priority those that were issued first. A forked process has not
    the thread, so every call raises there.
    """

    def __init__(self, limits: Limits, name: str) -> None:
        self._state = _State(limits)
        self._process = os.getpid()
        # It must not keep the queue alive, whose end is its own end.
        self._thread = threading.Thread(target=_work, args=(self._state,), name=name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _finish, self._state, self._thread, self._process)

    def issue(self, operation: str, request: Request, priority: int) -> int:
        """Issues a request and returns its timestamp.

        Raises:
            TimeoutError: there was no room for it in time; the message names the limit.
            ValueError: there never will be.
            RuntimeError: the queue was closed, or is a forked process's parent's.
        """
        self._check_process(operation)
        state, limits = self._state, self._state.limits
        if request.num_bytes > limits.max_pending_bytes:
            limit = f"max_pending_bytes, {limits.max_pending_bytes}"
            raise ValueError(f"{operation}: a request of {request.num_bytes} bytes exceeds {limit}")
        # The thread would wait for itself.
        patience = 0.0 if self._is_worker() else limits.issue_timeout
        with state.changed:
            if state.is_closed:
                raise RuntimeError(f"{operation}: the requests were closed")
            if not state.changed.wait_for(lambda: state.full(request.num_bytes) is None, patience):
                raise TimeoutError(f"{operation}: {state.full(request.num_bytes)} within {patience:g} s")
            return state.add(request, priority)

    def wait(self, timestamp: int, timeout: float | None) -> None:
        """Waits until a request is finished.

        Raises:
            TimeoutError: it is not finished after `timeout` seconds; it goes on.
            ValueError: no request has this timestamp.
            RuntimeError: a callback waits for a request that comes after it.
            BaseException: whatever the request failed with.
        """
        self._wait("wait", timestamp, timeout)

    def wait_rows(self, timestamp: int, timeout: float | None) -> Tensor:
        """Waits for the rows of a request and takes them.

        Raises:
            ValueError: no request has this timestamp, or it has no rows to give.
            BaseException: as `wait`.
        """
        self._wait("wait_rows", timestamp, timeout)
        state = self._state
        with state.changed:
            rows = state.rows.pop(timestamp, None)
            if rows is None:
                reasons = "it is a push, out or its callback got them, or they were taken"
                raise ValueError(f"request {timestamp} has no rows to give: {reasons}")
            state.num_bytes -= rows.nbytes
            state.changed.notify_all()
            return rows

    def _wait(self, operation: str, timestamp: int, timeout: float | None) -> None:
        self._check_process(operation)
        state = self._state
        with state.changed:
            if not 0 <= timestamp < state.num_issued:
                raise ValueError(f"request {timestamp} was never issued")
            self._wait_until(lambda: timestamp not in state.unfinished, timestamp, timeout)
            error = state.failures.get(timestamp)
            if error is not None:
                state.untold.pop(timestamp, None)
                raise error

    def wait_all(self, timeout: float | None) -> None:
        """Waits until every request is finished, and raises what failed if nobody was told.

        Raises:
            TimeoutError: some are not finished after `timeout` seconds; they go on.
            BaseException: what a request failed with; of several the first one is told, and how many there are.
        """
        self._check_process("wait_all")
        state = self._state
        with state.changed:
            self._wait_until(lambda: not state.unfinished, min(state.unfinished, default=0), timeout)
            state.raise_untold()

    def num_pending(self) -> int:
        """The requests that are not finished."""
        self._check_process("num_pending")
        with self._state.changed:
            return len(self._state.unfinished)

    def close(self) -> None:
        """Finishes what is pending, ends the thread, and raises what nobody was told of."""
        self._check_process("close")
        with self._state.changed:
            self._state.is_closed = True
            self._state.changed.notify_all()
        if not self._is_worker():
            self._thread.join()
        with self._state.changed:
            self._state.raise_untold()

    def _wait_until(self, is_over: Callable[[], bool], timestamp: int, timeout: float | None) -> None:
        state = self._state
        if self._is_worker() and not is_over():
            raise RuntimeError(f"request {timestamp} cannot finish while a callback waits for it")
        began = monotonic()
        if not state.changed.wait_for(is_over, timeout):
            waited, pending = monotonic() - began, len(state.unfinished)
            raise TimeoutError(
                f"request {timestamp} did not finish within {waited:.3g} s; {pending} requests are pending"
            )

    def _check_process(self, operation: str) -> None:
        # Another thread of the parent may have held the lock, so it must not be touched here.
        if self._process != os.getpid():
            raise RuntimeError(
                f"{operation}: the requests of a forked process are its parent's: make others in the child"
            )

    def _is_worker(self) -> bool:
        return threading.current_thread() is self._thread


def _work(state: _State) -> None:
    """Carries requests out until there are no more."""
    while True:
        with state.changed:
            state.changed.wait_for(lambda: state.waiting or state.is_closed)
            taken = state.take_next()
        if taken is None:
            return
        _carry_out(state, *taken)
        del taken  # A callback may be what keeps the queue alive.


def _carry_out(state: _State, timestamp: int, request: Request) -> None:
    rows, error, is_told = None, None, False
    try:
        rows = request.call()
    except BaseException as raised:
        error = raised
    if request.callback is not None:
        try:
            request.callback(KVResponse(timestamp, rows, error))
            is_told = True
        except BaseException as raised:
            warnings.warn(f"request {timestamp}: its callback raised {raised!r}", RuntimeWarning, stacklevel=1)
            error = error or raised
        rows = None
    with state.changed:
        state.finish(timestamp, request, rows, error, is_told)


def _finish(state: _State, thread: threading.Thread, process: int) -> None:
    """Finishes what is pending when the queue is no longer used, or the program ends."""
    if process != os.getpid():
        return
    with state.changed:
        state.is_closed = True
        state.changed.notify_all()
    if threading.current_thread() is not thread:
        thread.join()
    for timestamp, error in state.untold.items():
        warnings.warn(f"request {timestamp} failed, and nobody was told: {error}", RuntimeWarning, stacklevel=1)
    state.untold.clear()
