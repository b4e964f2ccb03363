"""The tutorials: a page's programs and commands run one after another in one folder, and print what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from page_commands import Shell, all_blocks_of, commands_in, page_of

import recstore_ops

pytestmark = pytest.mark.tier("test")

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
PORTS = ("8000", "15000", "15001")
NOT_RUN = ("py",)
"""Code of other packages, beside which ours stands."""


@pytest.mark.parametrize("tutorial", [path.stem for path in TUTORIALS])
def test_all_of_a_tutorial_runs(tutorial: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in recstore_ops.table_names():
        recstore_ops.RecStoreClient().drop(table)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = all_blocks_of(page_of(f"tutorials/{tutorial}.md", PORTS))
    for kind, file, text in blocks:
        if file is not None:
            (tmp_path / file).write_text(text, "utf-8")
        elif kind == "python":
            exec(compile(text, f"{tutorial}.md", "exec"), names)
        elif kind == "console":
            shell.check(commands_in(text))
        else:
            assert kind in NOT_RUN
    assert any(kind in ("python", "console") for kind, _, _ in blocks)
