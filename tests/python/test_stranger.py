"""The program that times a stranger's first steps: its steps stand in pages, and one that fails ends its path."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
from ci_programs import program

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stranger() -> ModuleType:
    return program("stranger")


def test_steps_come_from_the_pages(stranger: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    options = Namespace(wheel=Path("recstore_ops.whl"), extras="train,serve")
    assert stranger._steps("clone", options)[-1] == "cd clone && make train"
    assert re.search(r"^make train ", readme, re.MULTILINE)
    assert "recstore_ops.whl[train,serve]'" in stranger._steps("wheel", options)[1]
    commands = [step.split()[:2] for step in stranger._steps("csv", options)[1:]]
    assert commands == [["recstore", "train"], ["recstore", "evaluate"], ["recstore", "predict"]]
    commands = [step.split()[0] for step in stranger._steps("curl", options)]
    assert commands == ["python", "recstore", "recstore", "recstore", "curl", "kill"]


def test_a_path_ends_with_the_step_that_fails(
    stranger: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"csv": ["touch here", "ls gone", "never"], "curl": ["yes &", "test ! -e here", "kill %1"]}
    monkeypatch.setattr(stranger, "_steps", lambda path, _: steps[path])
    assert stranger.main(["csv", "curl"]) == 1
    rows = re.findall(r"^\| (\w+) \| (.*) \| (.*) \|$", capsys.readouterr().out, re.MULTILINE)[1:]
    assert [(path, step) for path, step, _ in rows] == [
        *(("csv", "`touch here`"), ("csv", "`ls gone`")),
        *(("curl", "`yes &`"), ("curl", "`test ! -e here`"), ("curl", "`kill %1`")),
        ("curl", "a model to an answer of curl"),
    ]
    assert [seconds for *_, seconds in rows][1] == "failed"
    assert float(rows[-1][2].strip("*")) >= 0


def test_an_unknown_path_and_a_missing_wheel_are_named(
    stranger: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stranger.main(["cvs"])
    assert "there is no path cvs; there are clone, wheel, csv, curl" in capsys.readouterr().err
    monkeypatch.setattr(stranger, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="there is no wheel in dist/: `make wheel` makes one"):
        stranger.main(["wheel"])
