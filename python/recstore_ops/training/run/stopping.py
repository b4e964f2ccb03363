"""Ends a run before its last epoch: by signals, the second of which ends the process at once, or early stopping."""

from __future__ import annotations

import math
import os
import signal
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any


class EarlyStopping:
    """Stops after `patience` evaluations in a row without a new lowest logloss; 0 never stops."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._lowest = math.inf
        self._since = 0

    def should_stop(self, logloss: float) -> bool:
        """Takes an evaluation's validation logloss."""
        if logloss < self._lowest:
            self._lowest, self._since = logloss, 0
        else:
            self._since += 1
        return 0 < self._patience <= self._since

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that evaluations have changed."""
        return {"lowest": self._lowest, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self._lowest, self._since = state["lowest"], state["since"]


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = "recstore: {name}: saving after this step; a second signal ends the run at once, unsaved\n"


class RunStopped(Exception):
    """A run was asked to end, and was saved.

    Attributes:
        exit_code: 128 plus the signal's number, as for a process that a signal ended.

    Args:
        number: of the signal.
        step: the step after which the run was saved; None if it had not begun and was not saved.
    """

    def __init__(self, number: int, step: int | None) -> None:
        saved = "before it began" if step is None else f"and saved after step {step}; --resume goes on"
        super().__init__(f"stopped by {signal.Signals(number).name} {saved}")
        self.exit_code = 128 + number


class StopRequest:
    """Notes SIGINT and SIGTERM from `with` on; a context manager.

    Signals that are ignored stay so. Only the main thread can take signals: entered on another one, it notes none.

    Attributes:
        number: of the signal that came; None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if current_thread() is main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        # Python runs handlers between its own instructions only: the second signal must not wait for a long call.
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        # Not print, which the signal may have interrupted.
        os.write(2, _NOTICE.format(name=signal.Signals(number).name).encode())
