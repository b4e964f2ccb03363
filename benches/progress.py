"""A progress bar with the time left, where tqdm is installed and the output is a terminal; lines of text anyway."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any


class Progress:
    """Counts rounds; a context manager."""

    def __init__(self, rounds: int) -> None:
        self._bar: Any = _bar(rounds)
        self._stage_end = 0

    def start_stage(self, title: str, rounds: int) -> None:
        """Says what is prepared now. A stage that took fewer rounds than it might leaves a gap, which is closed."""
        if self._bar is not None:
            self._bar.update(max(0, self._stage_end - self._bar.n))
            self._bar.set_description(title)
        self._stage_end += rounds

    def advance(self) -> None:
        """One round was measured."""
        if self._bar is not None and self._bar.n < self._stage_end:
            self._bar.update(1)

    def write(self, text: str) -> None:
        """Writes lines above the bar."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(rounds: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    return tqdm(total=rounds, unit="round", dynamic_ncols=True, smoothing=0.05)
