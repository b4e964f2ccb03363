"""Runs that train on files as they arrive: they end as runs over files that were there before."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import saved_runs
import torch
from eventually import wait_until
from saved_runs import Signals, metrics_of, rows_of, run_train, state_of
from warm_processes import PROCESSES

from recstore_ops.training import TrainingConfig, planted_interactions
from recstore_ops.training.data.sparse_lines import write_libsvm
from recstore_ops.training.report.display import Display
from recstore_ops.training.report.recorded_run import RecordedRun
from recstore_ops.training.run.followed_files import FollowedFiles
from recstore_ops.training.run.input_config import FollowOptions
from recstore_ops.training.run.stopping import RunStopped, StopRequest

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is saved by a process that keeps its tables itself"),
]

IN_ALL = pytest.mark.tier("all")
DAYS = ("day1", "day2", "day3")
MODEL = ("--model", "deepfm", "--dropout", 0.2, "--batch-size", 48, "--log-every", 4)
FOLLOW = ("--follow-files", "in", "--follow-every", 0.05, "--follow-until-idle", 0.5, *MODEL)
ONE_PASS = ("--epochs", 1, "--validation-fraction", 0, *MODEL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `in/day1` to `in/day3`; batches divide the first two."""
    planted = planted_interactions(0, 1200, 100)
    (tmp_path / "in").mkdir()
    for name, start, stop in (("day1", 0, 480), ("day2", 480, 768), ("day3", 768, 1100)):
        write_libsvm(tmp_path / "in" / name, planted.train.rows(start, stop))
    return tmp_path


def assert_equal(one: Path, other: Path) -> None:
    """Compares what two runs saved last."""
    rows = rows_of(one / "checkpoint")
    assert all(tensors["rows"] for tensors in rows.values())
    assert rows == rows_of(other / "checkpoint")
    state, expected = state_of(one / "checkpoint"), state_of(other / "checkpoint")
    for name in ("model", "optimizers", "random", "step"):
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=0)


def train(folder: Path, *options: object) -> None:
    assert run_train(folder, options) == (0, "")


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if line["event"] == "evaluation"]


@pytest.mark.parametrize(
    "further",
    [
        (),
        pytest.param(("--hash-buckets", 64, "--num-fields", 8, "--optimizer", "ftrl"), marks=IN_ALL),
        pytest.param(("--cache-mb", 0, "--auc-by", "field_1", "--row-type", "bfloat16"), marks=IN_ALL),
        pytest.param(("--admit-after", 2, "--capacity", 90, "--eviction-interval", 3), marks=IN_ALL),
    ],
)
def test_following_files_is_one_run_over_them(folder: Path, further: tuple[object, ...]) -> None:
    train(folder, *FOLLOW, *further, "--no-shuffle", "--run-name", "followed")
    train(folder, *(f"in/{day}" for day in DAYS), *ONE_PASS, *further, "--no-shuffle", "--run-name", "whole")
    assert_equal(folder / "runs" / "followed", folder / "runs" / "whole")
    records = evaluations(folder / "runs" / "followed")
    assert [record["file"] for record in records] == list(DAYS)
    assert [record["validation_rows"] for record in records] == [480, 288, 332]
    assert [record["rows"] for record in records] == [480, 768, 1100]


@IN_ALL
def test_so_it_is_over_parquet_with_histories(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(0)
    for day in range(3):
        clicked = [rng.integers(0, 20, rng.integers(0, 5)).tolist() for _ in range(96)]
        columns = {"label": rng.integers(0, 2, 96), "item": rng.integers(0, 20, 96), "clicked": clicked}
        # The second file has another order of columns.
        names = sorted(columns, reverse=day == 1)
        pq.write_table(pa.table({name: columns[name] for name in names}), tmp_path / "in" / f"{day}.parquet")
    din = ("--model", "din", "--sequence", "clicked=item", "--no-shuffle", "--batch-size", 32)
    follow = ("--follow-files", "in", "--follow-every", 0.05, "--follow-until-idle", 0.5)
    train(tmp_path, *follow, *din, "--run-name", "followed")
    files = [f"in/{day}.parquet" for day in range(3)]
    train(tmp_path, *files, *din, "--epochs", 1, "--validation-fraction", 0, "--run-name", "whole")
    assert_equal(tmp_path / "runs" / "followed", tmp_path / "runs" / "whole")


def test_and_as_a_chain_of_runs_that_begin_with_each_other(folder: Path) -> None:
    # The last batch of the second day is a short one.
    batches = ("--batch-size", 50, "--no-shuffle")
    train(folder, *FOLLOW, *batches, "--run-name", "followed")
    train(folder, "in/day1", *ONE_PASS, *batches, "--run-name", "r1")
    for number in (2, 3):
        begin = ("--init-from", f"runs/r{number - 1}", "--run-name", f"r{number}")
        train(folder, f"in/day{number}", *ONE_PASS, *batches, *begin)
    followed, last = (state_of(folder / "runs" / name / "checkpoint") for name in ("followed", "r3"))
    for name in ("model", "optimizers", "random"):
        torch.testing.assert_close(followed[name], last[name], rtol=0, atol=0)
    tables, others = (rows_of(folder / "runs" / name / "checkpoint") for name in ("followed", "r3"))
    assert tables == others


def test_figures_are_those_of_evaluate_before_the_file(folder: Path) -> None:
    (folder / "later").mkdir()
    shutil.move(folder / "in" / "day3", folder / "later" / "day3")
    train(folder, *FOLLOW, "--run-name", "r")
    before = shutil.copytree(folder / "runs" / "r", folder / "runs" / "before")
    shutil.move(folder / "later" / "day3", folder / "in" / "day3")
    # It ended because nothing came; now something has.
    train(folder, *FOLLOW, "--run-name", "r", "--resume")
    assert "note: no file came to in for 0.5 s: the run ends" in (folder / "stdout").read_text()
    record = evaluations(folder / "runs" / "r")[-1]
    assert (record["file"], record["number"]) == ("day3", 3)
    for checkpoint in ("last", "best"):
        figures = evaluated(before, folder / "in" / "day3", checkpoint)
        for name in ("rows", "logloss", "auc", "calibration"):
            assert record[f"validation_{name}"] == pytest.approx(figures[name], rel=1e-6)


def evaluated(run: Path, file: Path, checkpoint: str) -> dict[str, Any]:
    process = PROCESSES.Process(target=_evaluate, args=(run, file, checkpoint))
    process.start()
    process.join(120)
    return json.loads((run / "evaluated").read_text())


def _evaluate(run: Path, file: Path, checkpoint: str) -> None:
    from recstore_ops import cli

    os.dup2(os.open(run / "evaluated", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    sys.argv = ["recstore", "evaluate", str(run), str(file), "--json", "--checkpoint", checkpoint]
    cli.main()


def test_files_that_are_written_slowly_or_moved_in(folder: Path) -> None:
    shutil.move(folder / "in", folder / "ready")
    (folder / "in").mkdir()

    def write() -> None:
        time.sleep(0.3)
        shutil.copy(folder / "ready" / "day1", folder / "in" / ".day1")
        os.rename(folder / "in" / ".day1", folder / "in" / "day1")
        for name in DAYS[1:]:
            lines = (folder / "ready" / name).read_text().splitlines(keepends=True)
            with open(folder / "in" / name, "w") as file:
                for start in range(0, len(lines), 50):
                    file.writelines(lines[start : start + 50])
                    file.flush()
                    time.sleep(0.1)

    writer = Thread(target=write)
    writer.start()
    slow = ("--follow-every", 1, "--follow-until-idle", 5)
    train(folder, *FOLLOW, *slow, "--no-shuffle", "--run-name", "followed")
    writer.join()
    train(folder, *(f"ready/{day}" for day in DAYS), *ONE_PASS, "--no-shuffle", "--run-name", "whole")
    assert_equal(folder / "runs" / "followed", folder / "runs" / "whole")


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGTERM, 3),
        (signal.SIGKILL, 14),
        pytest.param(signal.SIGTERM, 10, marks=IN_ALL),
        pytest.param(signal.SIGKILL, 2, marks=IN_ALL),
    ],
    ids=["in the first file", "in the second file", "at the end of a file", "before the first save"],
)
def test_a_run_that_ended_goes_on_to_the_bit(folder: Path, number: int, step: int) -> None:
    options = (*FOLLOW, "--save-every", 3, "--auc-by", "field_0")
    train(folder, *options, "--run-name", "whole")
    code, error = run_train(folder, (*options, "--run-name", "ended"), Signals(step, (number,)))
    assert code == (-number if number == signal.SIGKILL else 128 + number), error
    train(folder, *options, "--run-name", "ended", "--resume")
    assert metrics_of(folder / "runs" / "whole") == metrics_of(folder / "runs" / "ended")
    assert_equal(folder / "runs" / "whole", folder / "runs" / "ended")
    assert (folder / "runs" / "ended" / "segments.csv").read_text() == (
        folder / "runs" / "whole" / "segments.csv"
    ).read_text()


def test_a_signal_ends_a_run_that_waits(folder: Path) -> None:
    run = folder / "runs" / "r"
    options = [str(each) for each in (*FOLLOW, "--follow-until-idle", 100, "--run-name", "r")]
    process = PROCESSES.Process(target=saved_runs._train, args=(folder, options, None, None))
    process.start()
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(evaluations(run)) == 3)
    time.sleep(0.3)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 143
    assert "stopped by SIGTERM and saved after step 23; --resume goes on" in (folder / "stderr").read_text()
    assert f"note: waiting for files in {Path('in')}" in (folder / "stdout").read_text()


def test_a_signal_before_the_first_file_leaves_nothing(tmp_path: Path) -> None:
    from rich.console import Console

    stop = StopRequest()
    stop.number = signal.SIGTERM
    config = TrainingConfig(follow_files=str(tmp_path))
    with Display(Console(quiet=True), 1) as display:
        files = FollowedFiles(config, FollowOptions(), stop, display)
        with pytest.raises(RunStopped, match="stopped by SIGTERM before it began") as caught:
            files.begin(tmp_path, is_new=True)
    assert caught.value.exit_code == 143


def test_a_run_to_which_no_file_comes_ends_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    code, error = run_train(tmp_path, (*FOLLOW, "--run-name", "r"))
    assert (code, error) == (2, "recstore: no file came to in in 0.5 s\n")
    assert not (tmp_path / "runs" / "r").exists()


def write_csv(path: Path, seed: int, columns: str = "label,user,price") -> None:
    rng = np.random.default_rng(seed)
    cells = {"label": rng.integers(0, 2, 200), "user": rng.integers(0, 30, 200), "price": rng.random(200).round(3)}
    names = columns.split(",")
    lines = (",".join(str(cells[name][row]) for name in names) for row in range(200))
    path.write_text("\n".join([columns, *lines]) + "\n")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: write_csv(path, 1, "label,user"), "in/b.csv: there is no column 'price', which is number in "),
        pytest.param(
            lambda path: write_csv(path, 1, "user,price"),
            "in/b.csv: there is no column 'label', which is integer in ",
            marks=IN_ALL,
        ),
        (
            lambda path: path.write_text(path.read_text() + "1,2,dear\n"),
            "in/b.csv: row 201: column 'price': expected a number, got 'dear'",
        ),
        pytest.param(
            lambda path: path.write_bytes(b"\x1f\x8b\x08 no gzip"),
            "in/b.csv:1: the gzip stream is damaged",
            marks=IN_ALL,
        ),
    ],
    ids=["no column", "no label", "bad row", "damaged"],
)
def test_a_bad_file_ends_the_run_which_goes_on_when_it_is_mended(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "in").mkdir()
    for number, name in enumerate(("a.csv", "b.csv", "c.csv")):
        write_csv(tmp_path / "in" / name, number)
    train(tmp_path, *FOLLOW, "--run-name", "whole")
    spoil(tmp_path / "in" / "b.csv")
    code, error = run_train(tmp_path, (*FOLLOW, "--run-name", "r"))
    assert code == 2
    assert error.startswith(f"recstore: {message}")
    assert "note: the run is saved as it was before this file" in (tmp_path / "stdout").read_text()
    assert state_of(tmp_path / "runs" / "r" / "checkpoint")["step"] == 5
    assert (tmp_path / "runs" / "r" / "report.html").exists()
    write_csv(tmp_path / "in" / "b.csv", 1)
    (tmp_path / "in" / "a.csv").unlink()
    train(tmp_path, *FOLLOW, "--run-name", "r", "--resume")
    assert metrics_of(tmp_path / "runs" / "whole") == metrics_of(tmp_path / "runs" / "r")
    assert_equal(tmp_path / "runs" / "whole", tmp_path / "runs" / "r")


def test_bad_rows_are_skipped_and_noted_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, name in enumerate(("a.csv", "b.csv")):
        write_csv(tmp_path / "in" / name, number)
    (tmp_path / "in" / "b.csv").write_text((tmp_path / "in" / "b.csv").read_text() + "1,2,dear\n")
    train(tmp_path, *FOLLOW, "--on-bad-line", "skip", "--run-name", "r")
    assert "note: bad lines skipped in in/b.csv: 1; the first: in/b.csv: row 201" in (tmp_path / "stdout").read_text()


def test_it_begins_with_another_run_and_its_columns(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_csv(tmp_path / "a.csv", 0)
    write_csv(tmp_path / "in" / "b.csv", 1, "price,label,user")
    train(tmp_path, "a.csv", *ONE_PASS, "--run-name", "one")
    train(tmp_path, *FOLLOW, "--init-from", "runs/one", "--run-name", "followed")
    train(tmp_path, "in/b.csv", *ONE_PASS, "--init-from", "runs/one", "--run-name", "two")
    assert_equal(tmp_path / "runs" / "followed", tmp_path / "runs" / "two")
    output = (tmp_path / "stdout").read_text()
    assert "note: beginning with run runs/one after its step 5" in output
    assert "rows before" in output


def test_the_page_and_the_lines_name_the_files(folder: Path) -> None:
    train(folder, *FOLLOW, "--run-name", "r")
    best = RecordedRun.read(folder / "runs" / "r").best_evaluation()
    assert best is not None
    assert best["file"] == "day3"
    page = (folder / "runs" / "r" / "report.html").read_text()
    assert all(f"{day}</td></tr>" in page for day in DAYS)
    lines = (folder / "stdout").read_text().splitlines()
    assert [line.split()[-1] for line in lines if line.split()[0] in ("epoch", "1", "2", "3")][:4] == ["file", *DAYS]
    assert "3 files, the last day3: progressive logloss over all 1,100 rows" in (folder / "stdout").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("day1",), "a run that follows files takes no training files: all rows come from the directory"),
        (("--test", "day1"), "takes no test files: it is evaluated on each file before it is trained on it"),
        (("--planted", "pairs"), "a run that follows files takes no planted rows"),
        (("--epochs", 20), "a run that follows files passes over each file once: it takes no epochs 20"),
        (("--schedule", "linear"), "has no end known beforehand: it takes no schedule linear"),
        (("--validation-fraction", 0.1), "a run that follows files holds no rows out"),
        (("--patience", 3), "a run that follows files goes on whatever its evaluations are: it takes no patience"),
        (("--evaluate-every", 3), "a run that follows files is evaluated once a file: it takes no --evaluate-every"),
        (("--model", "two_tower", "--item-field", "b"), "takes no model two_tower: which items will come is not known"),
        (("--tables", "nn"), "takes no tables nn: which ids will come is not known beforehand"),
        (("--baseline", "nn"), "a run that follows files takes no baseline"),
        (("--follow-every", 0), "--follow-every must be above 0, got 0"),
        (("--follow-until", "in/done"), "--follow-until takes the name of a file in the directory, got 'in/done'"),
    ],
)
def test_what_has_no_meaning_beside_it_is_refused(
    recstore: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day1").write_text("1 1:1\n")
    assert recstore("train", "--follow-files", tmp_path, *map(str, options)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--follow-every", "2"), "a run without follow-files takes no follow-every"),
        (("--follow-until-idle", "2"), "a run without follow-files takes no follow-until-idle"),
        (("--follow-until", "done"), "a run without follow-files takes no follow-until"),
        (("--follow-files", "nowhere"), "no such directory to follow: nowhere"),
        (("--follow-files", ""), "it must name a file"),
    ],
)
def test_its_own_options_are_checked(
    recstore: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day1").write_text("1 1:1\n0 2:1\n")
    data = () if options[0] == "--follow-files" else ("day1",)
    assert recstore("train", *data, *options) != 0
    assert message in capsys.readouterr().err


def test_a_named_file_ends_the_run_after_all_others(folder: Path) -> None:
    until = ("--follow-files", "in", "--follow-every", 0.05, "--follow-until", "done", *MODEL)
    (folder / "in" / "done").write_text("no row")
    train(folder, *until, "--run-name", "named")
    said = (folder / "stdout").read_text()
    assert "done is in in, and no file that is not used: the run ends" in said
    assert [line["file"] for line in evaluations(folder / "runs" / "named")] == list(DAYS)
    train(folder, *FOLLOW, "--follow-until", "done", "--run-name", "idle")
    assert_equal(folder / "runs" / "named", folder / "runs" / "idle")


def test_a_named_file_and_no_other_is_an_error(folder: Path) -> None:
    for name in DAYS:
        (folder / "in" / name).unlink()
    (folder / "in" / "done").touch()
    ended = run_train(folder, (*FOLLOW, "--follow-until", "done", "--run-name", "none"))
    assert ended == (2, "recstore: done is in in, and no file that is not used\n")


def test_several_processes_are_refused(folder: Path) -> None:
    from recstore_ops.training.run import training_run
    from recstore_ops.training.run.job import Job

    job = Job()
    job.world = 2
    with pytest.raises(ValueError, match="a run that follows files has one process, got 2"):
        training_run._check_job(TrainingConfig(follow_files=str(folder)), job)


def test_defaults_are_those_of_one_pass_and_no_rows_held_out() -> None:
    config = TrainingConfig(follow_files="in")
    assert (config.epochs, config.validation_fraction, config.patience) == (1, 0, 0)
    other = TrainingConfig(planted="pairs")
    assert (other.epochs, other.validation_fraction, other.patience) == (20, 0.1, 2)
    assert TrainingConfig.from_json(json.loads(json.dumps(config.as_json()))) == config
