"""The comparison of two runs, on directories written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recstore_ops.training.report.comparison import write_comparison
from recstore_ops.training.report.recorded_run import RecordedRun

pytestmark = pytest.mark.tier("quick")

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def steps_event(step: int, loss: float, memory: int, table_bytes: int = 2**20) -> dict[str, Any]:
    return {
        "event": "steps",
        "step": step,
        "rows": step * 100,
        "loss": loss,
        "table_rows": step * 5,
        "table_bytes": table_bytes,
        "process_bytes": memory,
    }


def evaluation_event(number: int, logloss: float, test_logloss: float, seconds: float) -> dict[str, Any]:
    held_out = {"validation": logloss, "test": test_logloss}
    return {
        "event": "evaluation",
        "number": number,
        "rows": number * 1000,
        "train_rows": 1000,
        "train_seconds": seconds,
        **{f"{part}_logloss": figure for part, figure in held_out.items()},
        **{f"{part}_auc": 0.7 + figure / 100 for part, figure in held_out.items()},
        **{f"{part}_calibration": 1.0 for part in held_out},
    }


def write_run(path: Path, events: list[dict[str, Any]], **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model": "fm", "seed": 3, "optimizer": "adagrad", **config}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def our_run(path: Path, **config: Any) -> Path:
    events = [
        steps_event(5, 0.60, 300 * 2**20),
        steps_event(10, 0.50, 400 * 2**20, 2 * 2**20),
        evaluation_event(1, 0.50, 0.52, 0.5),
        steps_event(20, 0.40, 350 * 2**20),
        evaluation_event(2, 0.55, 0.51, 0.5),
        {"event": "end", "seconds": 3.0, "finished": True},
    ]
    return write_run(path, events, tables="store", **config)


def their_run(path: Path, **config: Any) -> Path:
    events = [
        {"event": "vocabulary", "ids": 1000, "seconds": 2.0},
        steps_event(10, 0.51, 800 * 2**20),
        evaluation_event(1, 0.60, 0.62, 1.0),
        steps_event(20, 0.425, 800 * 2**20),
        evaluation_event(2, 0.5001, 0.55, 1.0),
        {"event": "end", "seconds": 6.0, "finished": True},
    ]
    return write_run(path, events, tables="nn", **config)


def cells_of(report: str) -> dict[str, list[str]]:
    """The cells of the report's tables by their first one."""
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


@pytest.fixture
def report(tmp_path: Path) -> str:
    write_comparison(tmp_path / "report", our_run(tmp_path / "a"), their_run(tmp_path / "b"))
    return (tmp_path / "report" / "report.md").read_text()


def test_quality_is_that_of_the_best_evaluation_of_each(report: str) -> None:
    cells = cells_of(report)
    assert cells["validation logloss"] == ["0.50000", "0.50010", "-0.0001"]
    assert cells["test logloss"] == ["0.52000", "0.55000", "-0.03"]
    assert cells["validation AUC"] == ["0.70500", "0.70500", "-1e-06"]
    assert cells["test calibration"] == ["1.00000", "1.00000", "0"]


def test_time_has_a_ratio(report: str) -> None:
    cells = cells_of(report)
    assert cells["training rows per second"] == ["2,000", "1,000", "2.00 x"]
    assert cells["seconds of training"] == ["1.00", "2.00", "0.50 x"]
    assert cells["seconds for the vocabulary"] == ["-", "2.00", "-"]
    assert cells["seconds in all"] == ["3.00", "6.00", "0.50 x"]


def test_memory_is_the_peak(report: str) -> None:
    cells = cells_of(report)
    assert cells["peak of the process, MiB"] == ["400.0", "800.0", "0.50 x"]
    assert cells["tables, MiB"] == ["2.00", "1.00", "2.00 x"]
    assert cells["rows in tables"] == ["100", "100", "1.00 x"]


def test_training_losses_are_compared_where_both_recorded_them(report: str) -> None:
    assert "Training losses differ by at most 0.025 nats, at step 20." in report


def test_the_plot_is_written_and_shown_in_the_report(tmp_path: Path, report: str) -> None:
    assert "(comparison.png)" in report
    assert (tmp_path / "report" / "comparison.png").read_bytes().startswith(PNG_MAGIC)


def test_the_text_has_the_same_rows_and_fits_a_terminal(tmp_path: Path) -> None:
    text = write_comparison(tmp_path / "report", our_run(tmp_path / "a"), their_run(tmp_path / "b"))
    assert "training rows per second" in text
    assert "2.00 x" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_options_that_differ_are_listed(tmp_path: Path) -> None:
    ours, theirs = our_run(tmp_path / "a", lr=0.1), their_run(tmp_path / "b", lr=0.2)
    write_comparison(tmp_path / "report", ours, theirs)
    cells = cells_of((tmp_path / "report" / "report.md").read_text())
    assert cells["lr"] == ["0.1", "0.2"]
    assert "tables" not in cells


@pytest.mark.parametrize("option", [{"model": "lr"}, {"seed": 4}])
def test_runs_of_other_models_or_seeds_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"runs of one {name} can be compared, these have"):
        write_comparison(tmp_path / "report", our_run(tmp_path / "a"), their_run(tmp_path / "b", **option))
    assert not (tmp_path / "report").exists()


def test_runs_that_ended_early_are_compared_as_far_as_they_went(tmp_path: Path) -> None:
    ours = write_run(tmp_path / "a", [steps_event(10, 0.5, 2**20)])
    text = write_comparison(tmp_path / "report", ours, their_run(tmp_path / "b"))
    assert "The run with recstore did not finish." in text
    assert "torch.nn.Embedding did not finish" not in text


def test_a_directory_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the directory of a run"):
        write_comparison(tmp_path / "report", tmp_path, tmp_path)


def test_without_validation_rows_the_last_evaluation_counts(tmp_path: Path) -> None:
    lines = [{"event": "evaluation", "number": n, "rows": n, "test_logloss": n / 10} for n in (1, 2)]
    assert RecordedRun.read(write_run(tmp_path / "run", lines)).best_evaluation() == lines[1]
