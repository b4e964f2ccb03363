"""Peers that connect and say nothing, in a process of their own, and what others notice of them."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType

_PEERS = """
import resource, socket, sys, time
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
peers = []
for number in range(count):
    try:
        peers.append(socket.create_connection((host, port), timeout=10))
    except OSError:
        pass
print(len(peers), flush=True)
sys.stdin.read()
"""


class SilentPeers:
    """So many silent connections to an address, as long as the block lasts.

    Attributes:
        process: where they are.
    """

    def __init__(self, address: str, count: int) -> None:
        host, _, port = address.rpartition(":")
        command = [sys.executable, "-c", _PEERS, host, port, str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def opened(self) -> int:
        """Waits until each has tried to connect, and returns how many could."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def __enter__(self) -> SilentPeers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.communicate(timeout=60)


def slowest_of_windows(ask: Callable[[], object], seconds: float, windows: int = 8) -> float:
    """Asks again and again, and returns the median over windows of time of the 99th percentile of a question's time."""
    found = []
    for _ in range(windows):
        end, times = time.monotonic() + seconds / windows, []
        while time.monotonic() < end or len(times) < 5:
            began = time.perf_counter()
            ask()
            times.append(time.perf_counter() - began)
        found.append(sorted(times)[int(len(times) * 0.99)])
    return statistics.median(found)
