"""The command `recstore` in processes of their own that find torch imported, which takes longer than what they do."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import torch
from warm_processes import PROCESSES

from recstore_ops import cli


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, and what it wrote."""

    returncode: int | None
    stdout: str
    stderr: str


class WarmRecstore:
    """A running `recstore ARGUMENTS`, on one thread of torch, as `subprocess.Popen` would start it.

    Attributes:
        stdout: what it writes, or its standard output alone, with `stderr` apart.
        stderr: what it writes to the standard error; `None` where that goes to `stdout`.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        splits: bool = False,
    ) -> None:
        self.stdout, written = _pipe()
        self.stderr, errors = _pipe() if splits else (None, written)
        texts = [str(argument) for argument in arguments]
        own = (texts, str(cwd or Path.cwd()), dict(env or {}), written, errors)
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


def run_recstore(*arguments: object, cwd: Path | None = None) -> Ended:
    """Runs `recstore ARGUMENTS` to its end, within `cwd`."""
    process = WarmRecstore(*arguments, cwd=cwd, splits=True)
    stdout, stderr = process.communicate(120)
    return Ended(process.returncode, stdout, stderr)


def _pipe() -> tuple[IO[str], Connection]:
    """The end that is read, as a file, and the one that is written to."""
    reading, writing = PROCESSES.Pipe(duplex=False)
    return os.fdopen(os.dup(reading.fileno()), encoding="utf-8", errors="replace"), writing


def _run(arguments: list[str], folder: str, env: dict[str, str], written: Connection, errors: Connection) -> None:
    for connection, number in ((written, 1), (errors, 2)):
        os.dup2(connection.fileno(), number)
    for connection in {written, errors}:
        connection.close()
    os.chdir(folder)
    os.environ.update(env)
    # Whoever runs the tests in the background ignores it, and what is ignored stays so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    sys.argv = ["recstore", *arguments]
    cli.main()
