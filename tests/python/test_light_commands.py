"""What the command `recstore` imports: a command what it uses, and its version and its help nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from warm_recstore import WarmRecstore, run_recstore

from recstore_command.commands import COMMANDS

pytestmark = pytest.mark.tier("test")

HEAVY = ("torch", "numpy", "matplotlib", "pyarrow", "tensorboardX", "tqdm", "rich", "recstore_ops")
OF_TRAINING = ("matplotlib", "tensorboardX", "pyarrow", "recstore_ops.training")
WRITTEN = ("matplotlib", "tensorboardX", "pyarrow.compute")
OF_RUNS = ("evaluate", "predict", "export-vectors", "neighbours", "export", "quantize")


def imported(lines: list[str], modules: tuple[str, ...], folder: Path) -> list[str]:
    """Those of the modules that are imported after `recstore` has ended well with the arguments of each line."""
    script = f"""
import sys
from recstore_command import main
for arguments in {[line.split() for line in lines]!r}:
    sys.argv = ["recstore", *arguments]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0
print("imported", *(name for name in {modules!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()[-1].split()[1:]


def test_without_a_command_nothing_heavy_is_imported(tmp_path: Path) -> None:
    assert imported(["--version", "--help", "-h"], HEAVY, tmp_path) == []


def test_commands_about_tables_import_nothing_of_training(tmp_path: Path) -> None:
    commands = [name for name, (where, _) in COMMANDS.items() if ".training." not in where and name not in OF_RUNS]
    assert len(commands) == 10
    assert imported([f"{name} --help" for name in commands], OF_TRAINING, tmp_path) == []


def test_plots_and_events_are_imported_when_they_are_written(tmp_path: Path) -> None:
    assert imported(["train --help", "evaluate --help"], WRITTEN, tmp_path) == []


def test_every_command_is_listed_and_has_a_short_form_of_help() -> None:
    shown = run_recstore("--help").stdout
    listed = [line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == list(COMMANDS)
    assert "..." not in shown.partition("Commands:")[2]
    for name in COMMANDS:
        called = run_recstore(name, "-h")
        assert called.returncode == 0
        assert called.stdout.startswith(f"Usage: recstore {name} ")


def test_a_command_of_another_name_is_refused_with_the_nearest() -> None:
    done = run_recstore("trian")
    assert done.returncode == 2
    assert "No such command 'trian'. Did you mean 'train'?" in done.stderr


def test_the_help_of_train_is_grouped_and_short() -> None:
    lines = WarmRecstore("train", "--help", env={"COLUMNS": "100"}).ended().stdout.splitlines()
    assert len(lines) < 150
    assert max(map(len, lines)) <= 100
    headings = [line.rstrip(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Arguments", "Options", "Input", "Model", "Optimizer", "Training", "Output", "Beginning"]
