"""Saves that run in threads of their own: the handle that waits for one, and reports of those that failed.

A failure is reported once. Either the handle raises or returns it, or a `RuntimeWarning` reports it: when the handle is
gone, at the next save, or at the end of the process.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from recstore_ops.checkpoint.reports import SaveReport

_SECONDS_BETWEEN_LOOKS = 0.0005

_numbers = itertools.count(1)

_untold: dict[int, str] = {}
"""The messages of failed saves whose failure was not reported yet, by their numbers."""

# A failure of the parent's is the parent's to tell.
os.register_at_fork(after_in_child=_untold.clear)


class PendingSave(Future[SaveReport]):
    """A save that `save_async` began. `result()` waits for its report and raises what it failed with.

    Args:
        path: the directory or URL that it saves to, for messages.

    Attributes:
        path: the same.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._number = next(_numbers)
        # By its number: a message must not keep the handle alive whose end reports it.
        weakref.finalize(self, _tell, self._number)
        self.set_running_or_notify_cancel()

    def set_exception(self, exception: BaseException | None) -> None:
        """Ends the save with a failure."""
        _untold[self._number] = (
            f"save {self._number} that save_async began in this process, to {self.path}, failed, and nobody has asked "
            f"for its result: {exception}"
        )
        super().set_exception(exception)

    def result(self, timeout: float | None = None) -> SaveReport:
        """The report, once the save has ended.

        Args:
            timeout: the most seconds to wait.

        Raises:
            TimeoutError: the save has not ended, and goes on.
            RuntimeError: as `recstore_ops.checkpoint.save`.
        """
        try:
            return super().result(timeout)
        finally:
            self._note_asked()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the save, once it has ended; `None` if it succeeded."""
        try:
            return super().exception(timeout)
        finally:
            self._note_asked()

    def _note_asked(self) -> None:
        if self.done():
            _untold.pop(self._number, None)


def begin(save: PendingSave, work: Callable[[], SaveReport], has_begun: Callable[[], bool]) -> PendingSave:
    """Does `work` in a thread, and returns when it has begun or ended.

    Args:
        save: gets the result of the work.
        work: saves.
        has_begun: whether later changes are no longer part of the save.
    """
    # No daemon: the process does not end before the save has.
    Thread(target=_run, args=(save, work), name="recstore-save").start()
    while not (has_begun() or save.done()):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return save


def _run(save: PendingSave | None, work: Callable[[], SaveReport]) -> None:
    assert save is not None
    try:
        report = work()
    except BaseException as error:
        save.set_exception(error)
        save = None  # The error has this frame, and the save the error: a circle would outlive all who know the save.
    else:
        save.set_result(report)


def tell_failures() -> None:
    """Warns of the failed saves whose failure was not reported yet. It goes before each save."""
    for number in list(_untold):
        _tell(number)


def _tell(number: int) -> None:
    message = _untold.pop(number, None)
    if message is not None:
        warnings.warn(message, RuntimeWarning, stacklevel=4)


__all__ = ["PendingSave", "begin", "tell_failures"]
