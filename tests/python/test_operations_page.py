"""The commands of docs/operations.md: each is run, one after another, and prints what the page says."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from warm_recstore import WarmRecstore

pytestmark = pytest.mark.tier("test")

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
PORTS = ("15000", "15001", "15002", "9100", "9101")
"""The ports that the page names; others take their places, for these may be taken."""

BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    """A line behind a prompt, and the lines that it prints; `...` stands for any number of them."""

    line: str
    printed: list[str]


class Shell:
    """Runs `recstore` in a folder; commands that end with `&` go on until `kill` ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: list[WarmRecstore] = []

    def run(self, command: Command) -> list[str]:
        """Returns what a command prints."""
        if killed := re.fullmatch(r"kill %(\d+)", command.line):
            process = self._jobs.pop(int(killed[1]) - 1)
            process.send_signal(signal.SIGTERM)
            return process.communicate()[0].splitlines()
        program, *arguments = shlex.split(command.line.removesuffix("&"))
        assert program == "recstore"
        goes_on = command.line.endswith("&")
        # What a server logs comes when it will.
        process = WarmRecstore(*arguments, cwd=self._folder, splits=goes_on)
        if not goes_on:
            return process.communicate()[0].splitlines()
        self._jobs.append(process)
        return [process.stdout.readline().rstrip("\n") for _ in command.printed]

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._jobs:
            process.kill()
            process.communicate()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.end()


def test_every_command_prints_what_the_page_says(shell: Shell, tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True):
        page = re.sub(rf"\b{port}\b", str(free), page)
    blocks = [(found["kind"], found["text"]) for found in BLOCK.finditer(page)]
    file = next(text for kind, text in blocks if kind == "json")
    assert json.loads(file)["cache_ps"]["durability"] == "wal"
    (tmp_path / "recstore_config.json").write_text(file, "utf-8")
    commands = [command for kind, text in blocks if kind == "console" for command in commands_of(text)]
    assert len(commands) > 15
    for command in commands:
        printed = shell.run(command)
        assert re.fullmatch(pattern(command.printed), "\n".join(printed), re.DOTALL), (command, printed)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, no two alike."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def commands_of(text: str) -> Iterator[Command]:
    """Reads the commands of a block, each with what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, *printed = part.rstrip("\n").split("\n")
        yield Command(line, printed)


def pattern(printed: list[str]) -> str:
    """What fits lines, of which `...` stands for any."""
    return "\n".join(".*" if line == "..." else re.escape(line) for line in printed)
