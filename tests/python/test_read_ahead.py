"""Reading ahead: order, how far, exceptions in their place, and no thread left behind."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from eventually import wait_until

from recstore_ops.training.data.read_ahead import read_ahead

pytestmark = pytest.mark.tier("quick")

THREAD = "recstore-read-ahead"


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert readers() == []


@pytest.mark.parametrize("depth", [1, 2, 100])
@pytest.mark.parametrize("count", [0, 1, 5, 50])
def test_items_come_in_order(depth: int, count: int) -> None:
    assert list(read_ahead(range(count), depth)) == list(range(count))


def test_none_and_exceptions_are_items_like_others() -> None:
    error = ValueError("an item")
    assert list(read_ahead([None, error, ()])) == [None, error, ()]


def test_no_more_than_the_depth_is_read_ahead() -> None:
    read: list[int] = []
    items = read_ahead((read.append(n) or n for n in range(100)), depth=3)
    assert next(items) == 0
    # Three wait, and one more is in the thread's hand.
    wait_until(lambda: len(read) == 5)
    time.sleep(0.05)
    assert len(read) == 5
    items.close()


def test_nothing_is_read_before_the_first_item_is_asked_for() -> None:
    items = read_ahead(iter(range(3)))
    assert readers() == []
    assert list(items) == [0, 1, 2]


def failing(count: int) -> Iterator[int]:
    yield from range(count)
    raise ValueError("no more")


@pytest.mark.parametrize("count", [0, 1, 20])
def test_an_exception_comes_after_the_items_before_it(count: int) -> None:
    got: list[int] = []
    with pytest.raises(ValueError, match="no more"):
        got.extend(read_ahead(failing(count), depth=2))
    assert got == list(range(count))


def test_what_is_no_iterable_raises_where_it_is_read() -> None:
    with pytest.raises(TypeError):
        list(read_ahead(3))  # pyright: ignore[reportArgumentType]


def endless(closed: list[bool]) -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        closed.append(threading.current_thread().name == THREAD)


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_closing_ends_the_thread_and_the_source(depth: int, pause: float) -> None:
    for _ in range(20):
        closed: list[bool] = []
        items = read_ahead(endless(closed), depth)
        next(items)
        time.sleep(pause / 20)
        items.close()
        assert readers() == []
        assert closed == [True]


def test_dropping_the_generator_ends_the_thread() -> None:
    closed: list[bool] = []
    for _ in read_ahead(endless(closed)):
        break
    assert readers() == []
    assert closed == [True]


def test_a_depth_below_one() -> None:
    with pytest.raises(ValueError, match="expected a depth of at least 1, got 0"):
        read_ahead([], 0)


def test_a_program_ends_with_a_reader_left_open() -> None:
    source = Path(str(inspect.getsourcefile(read_ahead))).read_text()
    program = source + "\nimport itertools\nitems = read_ahead(itertools.count())\nprint(next(items))\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")
