"""The commands of docs/serving.md, from training to an answer over HTTP: each is run and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_commands import Shell, commands_of, page_of

pytestmark = pytest.mark.tier("all")


def test_every_command_prints_what_the_page_says(shell: Shell, tmp_path: Path) -> None:
    clicks = [f"{row * 31 % 101},{row * 17 % 53},{int(row * row % 7 < 2)}" for row in range(2000)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,label", *clicks]) + "\n")
    commands = commands_of(page_of("serving.md", ("8000", "8001")))
    assert [command.line.split()[1] for command in commands if command.line.startswith("recstore")] == [
        "train",
        "export",
        "quantize",
        "serve-model",
    ]
    shell.check(commands)
