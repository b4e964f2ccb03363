"""`recstore train --profile`: the time of a run by phase."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recstore_ops.training.run.phases import Phases

pytestmark = pytest.mark.tier("test")

TRAIN = (sys.executable, "-m", "recstore_ops.cli", "train", "--planted", "pairs", "--planted-rows", "2000")


class Clock:
    """Goes on by a second with each look."""

    def __init__(self) -> None:
        self.seconds = -1.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def test_a_phase_within_another_has_its_time_for_itself() -> None:
    phases = Phases(Clock())
    with phases("forward"):
        with phases("lookup"):
            pass
        with phases("lookup"):
            pass
    with pytest.raises(ValueError, match="bad"), phases("step"):
        raise ValueError("bad")
    assert phases.seconds() == {"other": 3.0, "forward": 3.0, "lookup": 2.0, "step": 1.0}


def test_time_counts_from_the_beginning_of_the_training_on() -> None:
    clock = Clock()
    phases = Phases(clock)
    clock.seconds += 100
    phases.begin()
    assert phases.seconds() == {"other": 1.0}


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("forward", {"other": 2.0, "forward": 3.0, "lookup": 2.0}),
        ("evaluation", {"other": 2.0, "evaluation": 5.0}),
    ],
)
def test_calls_of_tables_on_the_way_forward_are_lookups_also_those_that_fail(
    phase: str, expected: dict[str, float]
) -> None:
    phases = Phases(Clock())
    table = torch.nn.Embedding(2, 3)
    phases.watch_lookups(iter([table]))
    with phases(phase):
        table(torch.tensor([0, 1], device="cpu"))
        with pytest.raises(IndexError):
            table(torch.tensor([2], device="cpu"))
    assert phases.seconds() == expected


def test_the_table_has_a_line_a_phase_the_longest_first() -> None:
    phases = Phases(Clock())
    with phases("input"), phases("inner"):
        pass
    table = phases.table()
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["other", "input", "inner"]
    assert cells[1] == ["2.000", "2.000", "1.000"]
    assert cells[2] == ["40.0%", "40.0%", "20.0%"]


def test_a_run_shows_where_its_time_went(tmp_path: Path) -> None:
    command = [*TRAIN, "--model", "deepfm", "--epochs", "1", "--patience", "0", "--profile"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout[done.stdout.index("time by phase") :].splitlines()[2:]
    shown = {line.split()[0] for line in lines if line.endswith("%")}
    assert shown == {
        "input",
        "lookup",
        "forward",
        "backward",
        "step",
        "dense",
        "evaluation",
        "report",
        "checkpoint",
        "other",
    }


def test_a_comparison_takes_no_profile(tmp_path: Path) -> None:
    done = subprocess.run([*TRAIN, "--baseline", "nn", "--profile"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "a comparison with a baseline takes no profile" in done.stderr
