"""Progress bars on the standard error, drawn by tqdm if they are shown."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from typing_extensions import Self

from recstore_ops.config.extras import imported, is_installed


class Bar(Protocol):
    """Reports the progress of work; a context that closes the bar."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> object: ...

    def update(self, n: int) -> object:
        """Says that `n` more are done."""


class _Hidden:
    """The bar of work that shows none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: int) -> None:
        pass


def is_watched() -> bool:
    """Whether a person sees the standard error: a terminal, or the page of a notebook, and no pipe, log or service."""
    ipython = sys.modules.get("IPython")
    return sys.stderr.isatty() or (ipython is not None and hasattr(ipython.get_ipython(), "kernel"))


def shows_progress(progress: bool | None) -> bool:
    """Whether a bar is shown: if asked for; by default if the standard error is watched and tqdm is installed."""
    return is_watched() and is_installed("tqdm") if progress is None else progress


def shown_bar(**options: Any) -> Any:
    """A bar with the options of tqdm.

    Raises:
        ImportError: tqdm is not installed.
    """
    return imported("tqdm", "train", "a progress bar").tqdm(**options, file=sys.stderr)


def progress_bar(progress: bool | None, **options: Any) -> Bar:
    """A bar with the options of tqdm, if it is shown.

    Raises:
        ImportError: it was asked for, and tqdm is not installed.
    """
    return shown_bar(**options) if shows_progress(progress) else _Hidden()


__all__ = ["Bar", "is_watched", "progress_bar", "shown_bar", "shows_progress"]
