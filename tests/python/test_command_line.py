"""The command `recstore` as a whole: its version, its completion, and each exit code of docs/operations.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_programs import run_program
from warm_recstore import WarmRecstore

from recstore_ops import __version__

pytestmark = pytest.mark.tier("test")

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
Recstore = Callable[..., int]


def test_the_version(recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
    assert recstore("--version") == 0
    assert capsys.readouterr().out == f"recstore {__version__}\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [pytest.param("recstore tra", "train", marks=pytest.mark.tier("all")), ("recstore train --mod", "--model")],
)
def test_commands_and_options_are_completed(words: str, completed: str) -> None:
    code = "from recstore_ops import cli; cli.app(prog_name='recstore')"
    environment = {**os.environ, "_RECSTORE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(words.count(" "))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert completed in done.stdout.split()


def test_the_page_lists_the_exit_codes_that_are_tested_here() -> None:
    table = PAGE.read_text("utf-8").partition("| exit code |")[2]
    codes = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    assert codes == ["0", "1", "2", "130, 143"]


def test_an_answer_that_is_no_is_1(recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
    assert recstore("top", "--once", "--interval", "0.05", "127.0.0.1:1") == 1
    assert "down" in capsys.readouterr().out


def test_a_fault_of_the_program_is_1_with_a_traceback(tmp_path: Path) -> None:
    code = "from recstore_ops import cli; cli.app.command('broken')(lambda: {}['row']); cli.main()"
    ended = run_program(f"import sys; sys.argv = ['recstore', 'broken']; {code}", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("KeyError: 'row'")


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (("trian",), "No such command 'trian'. Did you mean 'train'?"),
        (("train", "absent.csv"), "recstore: no such file or directory: absent.csv"),
        (("train",), "recstore: no training data: give files, a directory, or generated rows, as --planted pairs"),
        (("train", "--planted", "pairs", "--lr", "-1"), "recstore: lr must be above 0, got -1.0"),
        (("train", "--planted", "pairs", "--resume"), "recstore: resume needs the name of the run: give run-name"),
        (("top",), "recstore: recstore top needs either HOST:PORT of servers' metrics, or --config"),
        (("serve-model", "absent"), "recstore: absent is no bundle: it has no manifest.json"),
        (("serve", "--config", "absent.json"), "recstore: absent.json: No such file or directory"),
        (("generate", "absent/rows.tsv"), "recstore: there is no directory absent for rows.tsv"),
        (("compact", "absent"), "recstore: checkpoint: absent: there is no checkpoint here"),
        (("evaluate", "absent", "rows.csv"), "recstore: there is no run absent: it has no config.json"),
    ],
)
def test_what_a_user_can_mend_is_2_and_a_sentence(
    arguments: tuple[str, ...],
    last: str,
    recstore: Recstore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").touch()
    assert recstore(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert last in output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_a_run_and_ends_it(number: signal.Signals, code: int, tmp_path: Path) -> None:
    options = ("--planted", "pairs", "--epochs", 10_000, "--patience", 10_000, "--run-name", "long")
    process = WarmRecstore("train", *options, cwd=tmp_path, splits=True)
    for line in process.stdout:
        if re.match(r" +1 ", line):  # The first epoch's line.
            break
    process.send_signal(number)
    assert process.ended().returncode == code
    assert (tmp_path / "runs" / "long" / "checkpoint" / "manifest.json").is_file()
