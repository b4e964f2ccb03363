"""What takes longer than the runs of tests: plots, which the fixture `draws` asks for, and theory of planted rows."""

from __future__ import annotations

import pytest

from recstore_ops.training.report import run_directory
from recstore_ops.training.synthetic import input

_DRAWING = {
    name: getattr(run_directory, name) for name in ("draw_learning_curve", "draw_calibration", "draw_table_growth")
}


def leave_out() -> None:
    """Runs of this process draw nothing from here on."""
    for name in _DRAWING:
        setattr(run_directory, name, lambda *arguments: None)


def leave_out_all() -> None:
    """Runs of this process neither draw nor say what is known of planted rows."""
    leave_out()
    input._note = lambda planted: "planted"


def draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a test draw as runs of users do."""
    for name, draw in _DRAWING.items():
        monkeypatch.setattr(run_directory, name, draw)
