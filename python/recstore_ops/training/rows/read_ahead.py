"""Reading ahead in a thread of its own."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from queue import Empty, Queue
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


def read_ahead(items: Iterable[T], depth: int = 4) -> Generator[T, None, None]:
    """Gives the items in order while a thread reads up to `depth` more.

    An exception of `items` is raised where its item would have come. The thread begins with the first item asked for;
    it ends with the last one, or when the generator is closed or dropped, which waits for the item that is being read.

    Raises:
        ValueError: `depth` is below one.
    """
    if depth < 1:
        raise ValueError(f"expected a depth of at least 1, got {depth}")
    return _read_ahead(items, depth)


def _read_ahead(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    reader = _Reader(items, depth)
    try:
        yield from reader
    finally:
        reader.stop()


class _End:
    """Comes after the last item, or in place of one that failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Reader(Generic[T]):
    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._items = items
        self._fetched: Queue[T | _End] = Queue(depth)
        self._stopped = Event()
        self._thread = Thread(target=self._fetch, name="recstore-read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while not isinstance(item := self._fetched.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    def stop(self) -> None:
        self._stopped.set()
        self._make_room()
        # At the interpreter's exit the thread does not run any more, and never ends.
        if not sys.is_finalizing():
            self._thread.join()

    def _make_room(self) -> None:
        # The thread puts at most one item after it was stopped.
        try:
            while True:
                self._fetched.get_nowait()
        except Empty:
            pass

    def _fetch(self) -> None:
        end = _End(None)
        iterator = iter(())
        try:
            iterator = iter(self._items)
            for item in iterator:
                self._fetched.put(item)
                if self._stopped.is_set():
                    break
        except BaseException as error:
            end = _End(error)
        finally:
            # A generator that is left before its end closes its files now, in the thread that opened them.
            if isinstance(iterator, Generator):
                iterator.close()
            if not self._stopped.is_set():
                self._fetched.put(end)
