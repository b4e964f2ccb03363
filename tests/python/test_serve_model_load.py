"""`benches/serve_model.py`: it runs, and says what it cannot ask for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from served_models import bags, pairs

pytestmark = pytest.mark.tier("all")

BENCH = Path(__file__).parents[2] / "benches" / "serve_model.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *map(str, arguments), "--seconds", "0.3", "--", "--max-batch", "16"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_both_loops_are_measured(tmp_path: Path) -> None:
    done = run(pairs(tmp_path / "pairs", "serve_model_load"), "--rows", 4, "--connections", 3)
    assert (done.returncode, done.stderr) == (0, "")
    first, _, _, closed, opened = done.stdout.splitlines()
    assert first.endswith("requests are joined up to 16 rows")
    assert re.match(
        r"\| closed, 3 connections \| [1-9][\d,]* \| ([1-9][\d,]*|none) \| \d+\.\d+ \| \d+\.\d+ \| 0 \|", closed
    )
    assert re.match(r"\| open, [1-9][\d,]* per second \| ", opened)


def test_a_load_that_is_refused_is_no_figure(tmp_path: Path) -> None:
    done = run(bags(tmp_path / "bags", "serve_model_load"), "--rows", 4)
    assert done.returncode == 1
    assert "no request was answered, " in done.stderr
