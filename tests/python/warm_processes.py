"""Processes that find torch imported, which takes longer than what most of them do: forked from one that has it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from recstore_command.commands import COMMANDS

PROCESSES = multiprocessing.get_context("forkserver")
# Commands import their modules when they are called, runs the packages of their plots and events when they write them,
# optimizers `_dynamo` when they are made, and exports `_trace`.
_COMMANDS = {where.partition(":")[0] for where, _ in COMMANDS.values()}
_LATER = ["pyarrow.compute", "matplotlib.figure", "tensorboardX", "torch._dynamo", "torch.export._trace"]
PROCESSES.set_forkserver_preload([*sorted(_COMMANDS), *_LATER])

SECONDS = 120


def side_by_side(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], timeout: float = SECONDS
) -> list[Any]:
    """What a function of a module returns for each arguments, all called at once, each in a process of its own.

    Raises:
        multiprocessing.TimeoutError: one has not returned after so many seconds.
    """
    with PROCESSES.Pool(len(arguments), maxtasksperchild=1) as pool:
        return pool.starmap_async(function, arguments, chunksize=1).get(timeout)


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a process of its own."""
    return side_by_side(function, [arguments])[0]


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, and what it wrote."""

    returncode: int | None
    stdout: str
    stderr: str


class WarmProcess:
    """A function of a module that runs in a process of its own, as `subprocess.Popen` would start a program.

    Attributes:
        stdout: what it writes, or its standard output alone, with `stderr` apart.
        stderr: what it writes to the standard error; `None` where that goes to `stdout`.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        splits: bool = False,
    ) -> None:
        self.stdout, written = _pipe()
        self.stderr, errors = _pipe() if splits else (None, written)
        own = (function, arguments, str(cwd or Path.cwd()), dict(env or {}), written, errors)
        self._process = PROCESSES.Process(target=_run, args=own)
        self._process.start()
        for connection in {written, errors}:
            connection.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; `None` while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal; to one that has ended, none."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process by SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 60) -> int | None:
        """Waits for its end.

        Raises:
            TimeoutError: it still runs.
        """
        self._process.join(timeout)
        if self._process.is_alive():
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self.returncode

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """Waits for its end and returns the rest of what it wrote.

        Raises:
            TimeoutError: it still ran, and was killed.
        """
        killing = threading.Timer(timeout, self.kill)
        killing.start()
        written = self.stdout.read()
        errors = "" if self.stderr is None else self.stderr.read()
        was_killed = not killing.is_alive()
        killing.cancel()
        self.wait()
        if was_killed:
            raise TimeoutError(f"process {self.pid} still ran after {timeout} s, and had written: {written}{errors}")
        return written, errors

    def ended(self, timeout: float = SECONDS) -> Ended:
        """Waits for its end and says how that was.

        Raises:
            TimeoutError: it still ran, and was killed.
        """
        written, errors = self.communicate(timeout)
        return Ended(self.returncode, written, errors)


def _pipe() -> tuple[IO[str], Connection]:
    """The end that is read, as a file, and the one that is written to."""
    reading, writing = PROCESSES.Pipe(duplex=False)
    return os.fdopen(os.dup(reading.fileno()), encoding="utf-8", errors="replace"), writing


def _run(
    function: Callable[..., None],
    arguments: Sequence[object],
    folder: str,
    env: dict[str, str],
    written: Connection,
    errors: Connection,
) -> None:
    # Searches for reference cycles, and the last of all at the end, would copy each page that the processes share.
    gc.freeze()
    for connection, number in ((written, 1), (errors, 2)):
        os.dup2(connection.fileno(), number)
    for connection in {written, errors}:
        connection.close()
    os.chdir(folder)
    os.environ.update(env)
    # Whoever runs the tests in the background ignores it, and what is ignored stays so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function(*arguments)
