"""The commands of docs/operations.md: each is run, one after another, and prints what the page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from page_commands import Shell, blocks_of, commands_of, page_of

pytestmark = pytest.mark.tier("all")

PORTS = ("15000", "15001", "15002", "9100", "9101")


def test_every_command_prints_what_the_page_says(shell: Shell, tmp_path: Path) -> None:
    page = page_of("operations.md", PORTS)
    file = blocks_of(page, "json")[0]
    assert json.loads(file)["cache_ps"]["durability"] == "wal"
    (tmp_path / "recstore_config.json").write_text(file, "utf-8")
    commands = commands_of(page)
    assert len(commands) > 15
    shell.check(commands)
