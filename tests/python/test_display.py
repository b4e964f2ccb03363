"""What a run shows on the terminal, and where there is none."""

from __future__ import annotations

import io
import math
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from recstore_ops.config.progress_bars import is_watched
from recstore_ops.training.metrics.evaluation import Evaluation
from recstore_ops.training.report.display import Display
from recstore_ops.training.report.records import EvaluationRecord, StepRecord

pytestmark = pytest.mark.tier("quick")

STEPS = StepRecord(
    step=100,
    epoch=1,
    rows=25_600,
    loss=0.5,
    rows_per_second=1e5,
    lr=0.01,
    table_rows=1_234,
    table_bytes=10**6,
    process_bytes=10**8,
)


def evaluation(
    validation: Evaluation | None = None, test: Evaluation | None = None, epoch: float = 1.0, train_loss: float = 0.5
) -> EvaluationRecord:
    return EvaluationRecord(
        number=1,
        epoch=epoch,
        step=100,
        rows=25_600,
        train_loss=train_loss,
        train_rows=25_600,
        seconds=0.5,
        validation=validation,
        test=test,
        table_rows=12_345_678,
    )


def shown(*records: EvaluationRecord) -> list[str]:
    file = io.StringIO()
    with Display(Console(file=file, width=100), epochs=3) as display:
        for record in records:
            display.on_batch(1, 256, None, 0.6)
            display.on_steps(STEPS)
            display.on_evaluation(record)
    return file.getvalue().splitlines()


def test_a_line_an_evaluation_below_one_header() -> None:
    result = Evaluation(rows=100, positives=10, auc=0.75, logloss=0.4321, calibration=1.0123)
    header, first, second = shown(evaluation(result, result), evaluation(result, epoch=1.5))
    assert header.split()[:3] == ["epoch", "train", "loss"]
    assert first.split() == ["1", "0.5000", *["0.4321", "0.7500", "1.012"] * 2, "51,200", "12,345,678"]
    assert second.split() == ["1.50", "0.5000", "0.4321", "0.7500", "1.012", "-", "-", "-", "51,200", "12,345,678"]


def test_files_that_are_followed_are_named(tmp_path: Path) -> None:
    file = io.StringIO()
    result = Evaluation(rows=100, positives=10, auc=0.75, logloss=0.4321, calibration=1.0123)
    with Display(Console(file=file, width=100), epochs=1) as display:
        for number in range(2):
            for _ in range(3):
                display.on_waiting(tmp_path)
            display.on_file(tmp_path / f"[day]{number}.csv")
            display.on_batch(number + 1, 256, None, 0.6)
            display.on_evaluation(replace(evaluation(result), file=f"[day]{number}.csv"))
    note, header, first, second = file.getvalue().splitlines()
    assert note == f"note: waiting for files in {tmp_path}"
    assert [line.split()[-1] for line in (header, first, second)] == ["file", "[day]0.csv", "[day]1.csv"]


def with_bar(show: Callable[[Display], None]) -> tuple[str, str]:
    """What the lines and the bar of a display are."""
    lines, bar = io.StringIO(), io.StringIO()
    with Display(Console(file=lines, width=120), epochs=3, bar_file=bar) as display:
        show(display)
        display._bar.refresh()
    return lines.getvalue(), bar.getvalue()


def test_the_bar_says_which_file_the_run_is_at_and_that_it_waits(tmp_path: Path) -> None:
    def show(display: Display) -> None:
        display.on_waiting(Path("in"))
        display.on_file(tmp_path / "[b]1.csv")
        display.on_batch(7, 256, None, 0.6)

    lines, bar = with_bar(show)
    for text in ("waiting for files in in", "evaluating [b]1.csv", "file 7: [b]1.csv"):
        assert text in bar
    assert lines == ""


def test_columns_lie_below_their_names_and_fit_100_columns() -> None:
    result = Evaluation(rows=100, positives=10, auc=0.75, logloss=0.4321, calibration=0.9)
    for record in (evaluation(), evaluation(result, result), evaluation(result, result, train_loss=1e6)):
        header, line = shown(record)
        assert len(header) == len(line) == 100
        names = [match.end() for match in re.finditer(r"\S+( \S+)*", header)]
        assert [match.end() for match in re.finditer(r"\S+", line)] == names


@pytest.mark.parametrize(("positives", "calibration"), [(10, 2.0), (0, math.nan)])
def test_one_class_is_noted_once(positives: int, calibration: float) -> None:
    one_class = Evaluation(rows=10, positives=positives, auc=math.nan, logloss=0.4, calibration=calibration)
    lines = shown(evaluation(one_class), evaluation(one_class))
    notes = [line for line in lines if line.startswith("note:")]
    assert notes == ["note: the validation rows have labels of one class only: no AUC"]
    assert "nan" not in "".join(lines)


def test_without_a_terminal_there_is_no_bar() -> None:
    assert shown() == []


def test_the_bar_shows_epoch_loss_and_tables_and_goes() -> None:
    def show(display: Display) -> None:
        display.on_steps(STEPS)
        display.on_batch(2, 256, 1024, 0.6543)
        display.note("one [thing]")

    lines, bar = with_bar(show)
    assert lines == "note: one [thing]\n"
    assert re.search(r"epoch 2/3:  25%\|.*\| 256/1\.02k .*loss 0\.6543, 1,234 table rows", bar)
    assert bar.endswith("\r")
    assert "\n" not in bar


def test_an_evaluation_is_no_part_of_the_bars_rate() -> None:
    def show(display: Display) -> None:
        display.on_batch(1, 256, 1024, 0.5)
        display.on_evaluation(evaluation(epoch=0.5))
        display.on_batch(1, 512, 1024, 0.5)
        assert (display._bar.n, display._bar.initial) == (512, 512)

    with_bar(show)


def test_more_rows_than_expected_do_not_overflow_the_bar() -> None:
    _, bar = with_bar(lambda display: display.on_batch(1, 2048, 1024, 0.5))
    assert "100%" in bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Notebook:
    """What `IPython` is within a notebook."""

    kernel = object()

    def get_ipython(self) -> Notebook:
        return self


def test_a_person_sees_a_terminal_and_a_notebook_and_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not is_watched()
    monkeypatch.setitem(sys.modules, "IPython", Notebook())
    assert is_watched()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not is_watched()
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert is_watched()


@pytest.mark.parametrize("stderr", [io.StringIO, Terminal])
def test_the_bar_is_on_the_standard_error_where_that_is_seen(
    stderr: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())
    with Display(Console(file=io.StringIO()), epochs=1) as display:
        display.on_batch(1, 256, 1024, 0.5)
    assert isinstance(sys.stderr, io.StringIO)
    assert ("reading" in sys.stderr.getvalue()) == (stderr is Terminal)
