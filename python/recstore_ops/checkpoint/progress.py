"""A progress bar of what the store does to a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from recstore_ops import _native
from recstore_ops.config.progress_bars import shown_bar, shows_progress

_SECONDS_BETWEEN_LOOKS = 0.1


@contextmanager
def shown(what: str, progress: bool | None) -> Iterator[_native.CheckpointProgress]:
    """Shows how far the work within is, if asked for."""
    native = _native.CheckpointProgress()
    if not shows_progress(progress):
        yield native
        return
    ended = Event()
    bar = shown_bar(desc=what, unit="B", unit_scale=True, unit_divisor=1024)

    def look() -> None:
        done, bar.total = native.bytes()
        bar.update(done - bar.n)

    def watch() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            look()

    watcher = Thread(target=watch, name=f"recstore-{what}-progress", daemon=True)
    watcher.start()
    try:
        yield native
    finally:
        ended.set()
        watcher.join()
        look()
        bar.close()
