"""The plots of runs, which take far longer than the runs of tests: drawn where a test asks for the fixture `draws`."""

from __future__ import annotations

import pytest

from recstore_ops.training.report import run_directory

_DRAWING = {
    name: getattr(run_directory, name) for name in ("draw_learning_curve", "draw_calibration", "draw_table_growth")
}


def leave_out() -> None:
    """Runs of this process draw nothing from here on."""
    for name in _DRAWING:
        setattr(run_directory, name, lambda *arguments: None)


def draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a test draw as runs of users do."""
    for name, draw in _DRAWING.items():
        monkeypatch.setattr(run_directory, name, draw)
