"""A server hears every signal that asks it to end, whenever it comes and whichever thread it finds."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
from warm_processes import PROCESSES

from recstore_ops.cli.serve import EndSignals

ROUNDS = 300

pytestmark = pytest.mark.tier("test")


def wait_for(number: int, timeout: float) -> None:
    signals = EndSignals()
    assert not signals.came(0)
    os.kill(os.getpid(), number)
    assert signals.came(timeout)


def wait_while_one_comes() -> None:
    for _ in range(ROUNDS):
        signals = EndSignals()
        sending = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
        sending.start()
        assert signals.came(10)
        sending.join()


def wait_on_a_thread_that_takes_no_signals() -> None:
    signals = EndSignals()
    has_taken = threading.Event()
    other = threading.Thread(target=has_taken.wait)
    other.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)
    came = signals.came(10)
    has_taken.set()
    assert came


def succeeds(target: Callable[..., None], *arguments: object) -> bool:
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    process.kill()
    return process.exitcode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("timeout", [0, 10])
def test_one_that_came_before_the_wait_is_heard(number: int, timeout: float) -> None:
    assert succeeds(wait_for, number, timeout)


def test_one_that_comes_as_the_wait_begins_is_heard() -> None:
    assert succeeds(wait_while_one_comes)


def test_one_that_another_thread_takes_is_heard() -> None:
    assert succeeds(wait_on_a_thread_that_takes_no_signals)
