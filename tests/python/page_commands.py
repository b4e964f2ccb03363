"""Runs the commands of a page of docs, one after another, and compares what they print with what the page says."""

from __future__ import annotations

import re
import shlex
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from warm_programs import WarmProgram
from warm_recstore import WarmRecstore

_DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(?P<kind>\w+)(?: title=\"(?P<file>[\w.]+)\")?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code: its kind, the file that its title names, if it has one, and its text."""

    kind: str
    file: str | None
    text: str


class Command(NamedTuple):
    """A line behind a prompt, and the lines that it prints; `...` stands for any part of them, also none."""

    line: str
    printed: list[str]


def page_of(name: str, ports: Iterable[str]) -> str:
    """The text of a page, with free ports in the places of those that it names, which may be taken."""
    page = (_DOCS / name).read_text("utf-8")
    ports = list(ports)
    for port, free in zip(ports, _free_ports(len(ports)), strict=True):
        page = re.sub(rf"\b{port}\b", str(free), page)
    return page


def all_blocks_of(page: str) -> list[Block]:
    """The blocks of code of a page."""
    return [Block(*found.group("kind", "file", "text")) for found in _BLOCK.finditer(page)]


def blocks_of(page: str, kind: str) -> list[str]:
    """The texts of the blocks of a kind."""
    return [block.text for block in all_blocks_of(page) if block.kind == kind]


def commands_of(page: str) -> list[Command]:
    """The commands of a page's blocks `console`, each with what it prints."""
    return [command for text in blocks_of(page, "console") for command in commands_in(text)]


def commands_in(text: str) -> Iterator[Command]:
    """The commands of a block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, *printed = part.rstrip("\n").split("\n")
        yield Command(line, printed)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, no two alike."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Shell:
    """Runs `recstore`, `python FILE` and `curl` in a folder; what ends with `&` goes on until `kill` ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: list[WarmRecstore] = []

    def check(self, commands: Iterable[Command]) -> None:
        """Runs commands, each of which prints what its page says."""
        for command in commands:
            printed = self.run(command)
            text = "".join(f"{line.rstrip()}\n" for line in printed)
            assert re.fullmatch(_pattern(command.printed), text, re.DOTALL), (command, printed)

    def run(self, command: Command) -> list[str]:
        """Returns what a command prints."""
        if killed := re.fullmatch(r"kill %(\d+)", command.line):
            process = self._jobs.pop(int(killed[1]) - 1)
            process.send_signal(signal.SIGTERM)
            return process.communicate()[0].splitlines()
        program, *arguments = shlex.split(command.line.removesuffix("&"))
        if program == "curl":
            return _posted(*arguments)
        if program == "python":
            code = (self._folder / arguments[0]).read_text("utf-8")
            return WarmProgram(code, *arguments[1:], cwd=self._folder).communicate()[0].splitlines()
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


def _posted(silent: str, address: str, option: str, body: str) -> list[str]:
    """What `curl -s ADDRESS -d BODY` prints."""
    assert (silent, option) == ("-s", "-d")
    with urlopen(f"http://{address}", body.encode(), timeout=60) as answer:
        return answer.read().decode().splitlines()


def _pattern(printed: list[str]) -> str:
    """What fits lines, in which `...` stands for anything, and for no line too where it is one."""
    lines = (re.escape(f"{line}\n").replace(r"\.\.\.", ".*") for line in printed)
    return "".join(r"(?:.*\n)?" if line == "..." else fits for line, fits in zip(printed, lines, strict=True))
