"""Signals that ask a server to end."""

from __future__ import annotations

import os
import select
import signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EndSignals:
    """Hears SIGTERM, SIGINT and SIGHUP from its making on until the process ends, on the main thread."""

    def __init__(self) -> None:
        # A handler in Python runs between two instructions: one that comes as a wait begins would end no wait. The
        # interpreter itself writes to this pipe, at once and on whichever thread the signal finds.
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)

    def came(self, timeout: float) -> bool:
        """Whether one has come, or comes within `timeout` seconds."""
        return bool(select.select([self._reading], [], [], timeout)[0])
