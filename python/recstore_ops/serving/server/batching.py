"""Calls of the program on threads of their own: a bounded queue, and requests joined to one call."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recstore_ops import _native
from recstore_ops.serving.server.metrics import Metrics
from recstore_ops.serving.server.refusals import Kind, Refusal
from recstore_ops.serving.server.settings import ModelServerSettings

Program = Callable[[Sequence[Tensor]], list[Tensor]]
Answers = list["list[Tensor] | Exception"]


@dataclass
class _Waiting:
    """A request in the queue."""

    inputs: list[Tensor]
    rows: int
    since: float
    answer: asyncio.Future[list[Tensor]] = field(repr=False)

    @property
    def form(self) -> tuple[tuple[int, ...], ...]:
        """The sizes after the first dimension of each input. They must be equal in requests that are joined."""
        return tuple(tuple(each.shape[1:]) for each in self.inputs)


class Batcher:
    """Runs requests in the order in which they came.

    A free thread takes the oldest request. If requests are joined, it takes those after it too, as long as they fit,
    and waits for more no longer than `max_delay_us` after the oldest one came.

    Args:
        program: inputs to outputs; called on threads.
        joins: whether requests may be joined by their first dimension.
        settings: limits and threads.
        metrics: counts the calls.
    """

    def __init__(self, program: Program, joins: bool, settings: ModelServerSettings, metrics: Metrics) -> None:
        self._program = program
        self._most_rows = settings.max_batch if joins else 0
        self._delay = settings.max_delay_us / 1e6
        self._most_waiting = settings.max_queue
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._free = settings.workers
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        # OpenMP has this number for each thread that calls it, so every worker sets its own.
        self._pool = ThreadPoolExecutor(
            settings.workers, "recstore-model", torch.set_num_threads, (settings.torch_threads,)
        )

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the outputs of a request.

        Raises:
            Refusal: the queue is full, or the program fails.
        """
        if len(self._waiting) >= self._most_waiting:
            raise Refusal(Kind.BUSY, f"{len(self._waiting)} requests wait already: try again later")
        loop = asyncio.get_running_loop()
        rows = inputs[0].shape[0] if inputs and inputs[0].dim() else 1
        waiting = _Waiting(inputs, rows, loop.time(), loop.create_future())
        self._waiting.append(waiting)
        self._start(loop)
        return await waiting.answer

    def close(self) -> None:
        """Starts no further call."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives free threads what waits."""
        while self._free and self._waiting and not self._is_closed:
            if self._waiting[0].answer.done():  # Its client has gone.
                self._waiting.popleft()
                continue
            if (seconds := self._to_wait(loop.time())) > 0:
                if self._timer is None:
                    self._timer = loop.call_later(seconds, self._end_wait, loop)
                return
            self._call(loop, self._taken())

    def _to_wait(self, now: float) -> float:
        """Returns how long the oldest request waits for others, in seconds."""
        if not self._most_rows or not self._delay or sum(each.rows for each in self._waiting) >= self._most_rows:
            return 0.0
        return self._waiting[0].since + self._delay - now

    def _end_wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._start(loop)

    def _taken(self) -> list[_Waiting]:
        """Takes the requests of one call from the queue."""
        taken = [self._waiting.popleft()]
        rows, form = taken[0].rows, taken[0].form
        while self._waiting:
            following = self._waiting[0]
            if following.answer.done():
                self._waiting.popleft()
            # A request that does not fit ends the batch: those behind it do not overtake it.
            elif rows + following.rows > self._most_rows or following.form != form:
                break
            else:
                taken.append(self._waiting.popleft())
                rows += following.rows
        return taken

    def _call(self, loop: asyncio.AbstractEventLoop, taken: list[_Waiting]) -> None:
        # Only the event loop's thread changes this and the queue, so neither has a lock.
        self._free -= 1
        self._metrics.batch_requests.observe(len(taken))
        self._metrics.batch_rows.observe(sum(each.rows for each in taken))
        begin = time.perf_counter()
        call = loop.run_in_executor(self._pool, self._answers, [each.inputs for each in taken])
        call.add_done_callback(lambda done: self._finish(loop, taken, done, begin))

    def _finish(
        self, loop: asyncio.AbstractEventLoop, taken: list[_Waiting], done: asyncio.Future[Answers], begin: float
    ) -> None:
        self._free += 1
        self._metrics.forward_seconds.observe(time.perf_counter() - begin)
        answers = [Refusal(Kind.ENDING, _ENDED)] * len(taken) if done.cancelled() else done.result()
        for each, answer in zip(taken, answers, strict=True):
            if each.answer.done():
                continue
            if isinstance(answer, Exception):
                each.answer.set_exception(answer)
            else:
                each.answer.set_result(answer)
        self._start(loop)

    def _answers(self, requests: list[list[Tensor]]) -> Answers:
        """Runs requests in one call. If that fails, runs each alone, so that only the faulty ones fail."""
        if len(requests) == 1:
            return [self._answer(requests[0])]
        try:
            outputs = self._program([torch.cat(each) for each in zip(*requests, strict=True)])
        except Exception:
            return [self._answer(each) for each in requests]
        rows = [each[0].shape[0] for each in requests]
        return [list(each) for each in zip(*(output.split(rows) for output in outputs), strict=True)]

    def _answer(self, request: list[Tensor]) -> list[Tensor] | Exception:
        try:
            return self._program(request)
        except Exception as error:
            if _is_about_inputs(error):
                return Refusal(Kind.INVALID, f"the model refuses the inputs: {first_line(error)}")
            return Refusal(Kind.FAILED, f"the model failed: {first_line(error)}")


_ENDED = "the server ends"


def _is_about_inputs(error: Exception) -> bool:
    """Whether a client can mend it: guards of the program, indices, and what operators say of their arguments."""
    if isinstance(error, (AssertionError, IndexError, ValueError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # The guards of a program are torch's own, which has no type for them.
    operator = _native.failed_operator(str(error)) or ""
    return operator.startswith(("emb_", "hashtable_")) or str(error).startswith("Runtime assertion failed")


def first_line(error: Exception) -> str:
    """Returns what messages show of an error of the program."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
