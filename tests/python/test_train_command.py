"""`recstore train` on the command line: the files it leaves, and what it says to users."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eventually import wait_until
from training_runs import drop_tables, metrics_of
from warm_processes import PROCESSES

from recstore_ops import cli
from recstore_ops.training import planted_interactions, write_criteo
from recstore_ops.training.data.sparse_lines import write_libsvm
from recstore_ops.training.run import training_run
from recstore_ops.training.run.choices import MODEL_OPTIONS

pytestmark = pytest.mark.tier("test")

Recstore = Callable[..., int]

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def recstore(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recstore:
    """Runs the command line within `tmp_path` and returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["recstore", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        # Each run of the real program has a store of its own.
        for model in MODEL_OPTIONS:
            drop_tables(model)
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return run


@pytest.mark.usefixtures("draws")
def test_a_run_leaves_its_configuration_metrics_and_plots(recstore: Recstore, small_files: Path) -> None:
    options = ("--epochs", 3, "--patience", 0, "--dim", 4, "--run-name", "first")
    assert recstore("train", small_files, *options) == 0
    run = small_files / "runs" / "first"
    config = json.loads((run / "config.json").read_text())
    assert config["train"] == [str(small_files / "train.libfm")]
    assert (config["dim"], config["lr"], config["epochs"]) == (4, 2e-3, 3)
    evaluations = metrics_of(run, "evaluation")
    assert [line["epoch"] for line in evaluations] == [1, 2, 3]
    assert all(0 < line["test_auc"] < 1 and line["test_rows"] == 500 for line in evaluations)
    for plot in ("learning_curve", "calibration", "table_growth"):
        assert (run / f"{plot}.png").read_bytes().startswith(PNG_MAGIC)
    assert list(run.glob("events.out.tfevents.*"))


def test_output_that_is_no_terminal_has_one_line_an_evaluation(
    recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recstore("train", small_files, "--epochs", "3", "--patience", "0", "--run-name", "plain")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"note: {small_files / 'train.libfm'} is read as libsvm"
    assert lines[1].split()[:3] == ["epoch", "train", "loss"]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert "lowest validation logloss" in lines[5]
    assert lines[6] == "model: runs/plain/best"
    assert lines[7] == "results: runs/plain"
    assert len(lines) == 8


def test_a_run_can_be_repeated_under_another_name(recstore: Recstore, small_files: Path) -> None:
    figures = []
    for name in ("first", "second"):
        recstore("train", small_files, "--epochs", "2", "--model", "deepfm", "--run-name", name)
        lines = metrics_of(small_files / "runs" / name, "evaluation")
        figures.append([(line["train_loss"], line["test_auc"]) for line in lines])
    assert figures[0] == figures[1]


def test_an_existing_run_is_left_alone(
    recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_files / "runs" / "taken"
    run.mkdir(parents=True)
    assert recstore("train", small_files, "--run-name", "taken") == 2
    assert "run 'taken' exists already" in capsys.readouterr().err
    assert list(run.iterdir()) == []


def test_runs_without_a_name_get_their_own_directories(recstore: Recstore, small_files: Path) -> None:
    for _ in range(2):
        assert recstore("train", small_files, "--epochs", "1") == 0
    assert len(list((small_files / "runs").iterdir())) == 2


def test_planted_rows_need_no_files(recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--planted", "pairs", "--epochs", "1", "--batch-size", "1000", "--run-name", "planted")
    assert recstore("train", *options) == 0
    assert "test AUC and logloss of the true model: 0.88" in capsys.readouterr().out
    assert metrics_of(tmp_path / "runs" / "planted", "evaluation")[0]["test_rows"] == 10_000


def test_histories_need_no_files_either(recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--planted", "sequences", "--model", "din", "--sequence", "history=target", "--attention-hidden", "8,4")
    assert recstore("train", *options, "--epochs", "1", "--planted-rows", "2000", "--run-name", "histories") == 0
    assert "of the best reading of 5 sums over a history: 0.74" in capsys.readouterr().out
    config = json.loads((tmp_path / "runs" / "histories" / "config.json").read_text())
    assert (config["sequences"], config["attention_hidden"]) == ([["history", "target"]], [8, 4])


def test_tables_larger_than_their_memory_train_to_the_same_figures(recstore: Recstore, small_files: Path) -> None:
    same = ("--epochs", 1, "--run-name")
    assert recstore("train", small_files, *same, "memory") == 0
    assert recstore("train", small_files, *same, "disk", "--memory-limit", "80 KiB", "--disk", small_files) == 0
    configs = [json.loads((small_files / "runs" / run / "config.json").read_text()) for run in ("memory", "disk")]
    assert [config["memory_limit"] for config in configs] == [None, 80 * 1024]
    evaluations = [metrics_of(small_files / "runs" / run, "evaluation")[0] for run in ("memory", "disk")]
    figures = [[line[key] for key in ("train_loss", "test_auc", "test_logloss")] for line in evaluations]
    assert figures[0] == figures[1]
    assert recstore("train", small_files, *same, "bad", "--memory-limit", "4 GBit") != 0


def test_every_option_of_a_deep_model_takes_effect(recstore: Recstore, small_files: Path) -> None:
    options = (
        *("--model", "wide_deep", "--dim", 4, "--hidden", "8,4", "--dropout", 0.1, "--cross", "0,1", "--cross", "2,3"),
        *("--dense-optimizer", "adamw", "--dense-lr", 0.003, "--dense-option", "weight_decay=0.01"),
        *("--dense-option", "betas=[0.8, 0.99]", "--schedule", "exponential", "--gamma", 0.8, "--warmup-steps", 3),
        *("--epochs", 2, "--evaluate-every", 2, "--log-every", 1, "--run-name", "all", "--row-type", "bfloat16"),
        *("--optimizer-option", "amsgrad=true", "--optimizer-option", "betas=[0.9, 0.99]"),
    )
    assert recstore("train", small_files, *options) == 0
    run = small_files / "runs" / "all"
    config = json.loads((run / "config.json").read_text())
    assert (config["hidden"], config["crosses"]) == ([8, 4], [[0, 1], [2, 3]])
    assert config["dense_options"] == {"weight_decay": 0.01, "betas": [0.8, 0.99]}
    assert config["optimizer_options"] == {"amsgrad": True, "betas": [0.9, 0.99]}
    assert config["row_type"] == "bfloat16"
    steps = metrics_of(run, "steps")
    assert [line["lr"] for line in steps[:4]] == pytest.approx([0.002 / 3, 0.004 / 3, 0.002, 0.002])
    assert steps[-1]["lr"] == pytest.approx(0.0016)
    assert steps[-1]["table_rows"] > 2 * 400, "crosses have rows of their own"
    assert [line["step"] for line in metrics_of(run, "evaluation")] == [2, 4, 6, 8]


def test_criteo_files_train_as_they_are(recstore: Recstore, tmp_path: Path) -> None:
    write_criteo(tmp_path / "train.tsv.gz", 3000, seed=1)
    write_criteo(tmp_path / "test.tsv", 500, seed=2)
    assert recstore("train", tmp_path, "--model", "dlrm", "--auc-by", "C9", "--epochs", 1, "--run-name", "x") == 0
    run = tmp_path / "runs" / "x"
    assert metrics_of(run, "evaluation")[0]["test_rows"] == 500
    assert {line["part"] for line in metrics_of(run, "segments")} == {"validation", "test"}
    assert (run / "segments.csv").read_text().startswith("part,")


@pytest.fixture
def _warm_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a comparison find torch imported; in `make test-all` others are started as users have them."""
    monkeypatch.setattr(training_run, "get_context", lambda method: {"spawn": PROCESSES}[method])


@pytest.mark.usefixtures("_warm_sides")
def test_a_comparison_leaves_both_runs_and_a_report(
    recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--baseline", "nn", "--epochs", 2, "--log-every", 1, "--auc-by", "field_0", "--run-name", "both")
    assert recstore("train", small_files, *options) == 0
    both = small_files / "runs" / "both"
    ours, theirs = (metrics_of(both / side, "evaluation") for side in ("store", "nn"))
    assert [line["train_loss"] for line in ours] == pytest.approx([line["train_loss"] for line in theirs], abs=1e-5)
    assert [line["test_auc"] for line in ours] == pytest.approx([line["test_auc"] for line in theirs], abs=1e-4)
    assert metrics_of(both / "nn", "vocabulary")[0]["ids"] == 400
    assert (both / "comparison.png").read_bytes().startswith(PNG_MAGIC)
    report = (both / "report.md").read_text()
    assert all(word in report for word in ("rows per second", "MiB", "AUC"))
    assert "training rows per second" in capsys.readouterr().out
    segments = [(both / side / "segments.csv").read_text().splitlines()[1:] for side in ("store", "nn")]
    assert [line.split(",")[:3] for line in segments[0]] == [line.split(",")[:3] for line in segments[1]]


def test_a_comparison_that_nn_embedding_cannot_follow_leaves_nothing(
    recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recstore("train", small_files, "--baseline", "nn", "--optimizer", "ftrl") == 2
    assert "nn.Embedding(sparse=True) has no optimizer ftrl" in capsys.readouterr().err
    assert not (small_files / "runs").exists()


@pytest.mark.tier("all")
def test_a_killed_comparison_leaves_no_process(small_files: Path) -> None:
    command = [sys.executable, "-m", "recstore_ops.cli", "train", "train.libfm", "--baseline", "nn"]
    options = ["--epochs", "100000", "--patience", "0", "--run-name", "killed"]
    with subprocess.Popen([*command, *options], cwd=small_files, stdout=subprocess.DEVNULL) as parent:
        try:
            wait_until((small_files / "runs" / "killed" / "store" / "metrics.jsonl").exists)
            (child,) = [
                int(pid)
                for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
        finally:
            parent.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists())


@pytest.mark.tier("all")
def test_bad_input_in_a_comparison_is_one_sentence(
    recstore: Recstore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.libfm").write_text("1 3:1\n0 4:x\n")
    assert recstore("train", tmp_path, "--baseline", "nn") == 2
    error = capfd.readouterr().err
    assert "train.libfm:2: expected" in error
    assert "Traceback" not in error
    assert not list((tmp_path / "runs").iterdir())


def test_a_bad_line_stops_with_one_sentence_and_leaves_no_run(
    recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(small_files / "train.libfm", "a") as file:
        file.write("1 3:1 4:oops\n")
    assert recstore("train", small_files, "--run-name", "bad") == 2
    error = capsys.readouterr().err
    assert f"{small_files / 'train.libfm'}:1004: expected id:value" in error
    assert "got '4:oops'" in error
    assert error.count("\n") == 1
    assert not (small_files / "runs" / "bad").exists()


def test_too_few_rows_leave_no_run(recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.csv").write_text("label,user\n1,5\n")
    for _ in range(2):
        assert recstore("train", "one.csv", "--run-name", "one") == 2
        assert "no rows to evaluate: --validation-fraction 0.1 holds none out of 1 rows" in capsys.readouterr().err
        assert not (tmp_path / "runs" / "one").exists()
    assert recstore("train", "one.csv", "--run-name", "one", "--validation-fraction", 0, "--epochs", 1) == 0


def test_skipped_lines_are_reported(recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(small_files / "train.libfm", "a") as file:
        file.write("oops\n")
    assert recstore("train", small_files, "--on-bad-line", "skip", "--epochs", "1", "--run-name", "skip") == 0
    assert "bad lines skipped: 1; the first: " in capsys.readouterr().out


def test_test_rows_have_the_fields_of_the_training_rows(
    recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.libfm").write_text("1 1:1 2:1\n0 1:1 3:1\n" * 50)
    (tmp_path / "test.libfm").write_text("1 1:1 2:1 3:1\n")
    assert recstore("train", tmp_path, "--model", "deepfm") == 2
    assert "test.libfm:1: expected 2 features" in capsys.readouterr().err


@pytest.mark.usefixtures("draws")
def test_test_rows_of_one_class_have_no_auc(
    recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = planted_interactions(0, 100, 10).train
    write_libsvm(small_files / "test.libfm", replace(rows, labels=torch.ones(100)))
    assert recstore("train", small_files, "--epochs", "2", "--run-name", "one") == 0
    assert capsys.readouterr().out.count("the test rows have labels of one class only") == 1
    line = metrics_of(small_files / "runs" / "one", "evaluation")[0]
    assert line["test_auc"] is None
    assert line["test_logloss"] > 0


def test_a_cut_file_names_file_and_line(
    recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = gzip.compress((small_files / "train.libfm").read_bytes())
    (small_files / "train.libfm").write_bytes(whole[: len(whole) // 2])
    assert recstore("train", small_files) == 2
    error = capsys.readouterr().err
    assert "train.libfm:" in error
    assert "stream is damaged" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no training data"),
        (("absent.libfm",), "no such file or directory: absent.libfm"),
        (("--planted", "pairs", "--alpha", "1"), "optimizer adam takes no alpha; give lr"),
        (
            ("--planted", "pairs", "--optimizer", "ftrl", "--alpha", "1", "--lr", "1"),
            "alpha and lr are the same for ftrl",
        ),
        (("--planted", "pairs", "--run-name", "a/b"), "run name 'a/b' is not a plain directory name"),
        (("--planted", "pairs", "--epochs", "many"), "Invalid value for '--epochs'"),
        (("--planted", "pairs", "--model", "dnn"), "Invalid value for '--model'"),
        (("--planted", "pears"), "Invalid value for '--planted'"),
        (("--planted", "pairs", "--hidden", "8"), "model fm takes no hidden"),
        (("--planted", "pairs", "--model", "deepfm", "--hidden", "8,x"), "hidden takes whole numbers separated by"),
        (("--planted", "pairs", "--model", "wide_deep", "--cross", "1"), "cross takes two fields"),
        (("--planted", "pairs", "--model", "wide_deep", "--cross", "1,9"), "a cross needs two of the 8 fields"),
        (
            ("--planted", "pairs", "--model", "dcn", "--low-rank", "64"),
            "--low-rank must be from 1 to before the 64",
        ),
        (("--planted", "sequences", "--model", "din", "--sequence", "history"), "sequence takes HISTORY=TARGET, names"),
        (
            ("--planted", "sequences", "--model", "din", "--sequence", "clicks=target"),
            "sequences must name a field, one of history, target; got 'clicks'",
        ),
        (("--planted", "pairs", "--dense-option", "momentum"), "dense-option takes name=value, got 'momentum'"),
        (("--planted", "pairs", "--dense-optimizer", "lion"), "--dense-optimizer must be one of"),
        (("--planted", "pairs", "--auc-by", "user"), "--auc-by must name a field, one of field_0"),
        (("--planted", "pairs", "--save-every", "0"), "--save-every must be at least 1, got 0"),
        (("--planted", "pairs", "--keep", "0"), "--keep must be at least 1, got 0"),
        (
            ("--planted", "pairs", "--baseline", "nn", "--resume", "--keep", "2"),
            "a comparison with a baseline is not saved: it takes no keep and no resume",
        ),
        (("--planted", "pairs", "--seed", "9" * 23), f"seed must be at most {2**63 - 1}, got {'9' * 23}"),
        (("--planted", "pairs", "--init-table", "v"), "a run without --init-from takes no --init-table"),
        (("--planted", "pairs", "--follow-every", "nan"), "a run without follow-files takes no follow-every"),
        (
            ("--planted", "pairs", "--optimizer-option", "eps=NaN"),
            "--optimizer-option must be a finite number",
        ),
        (
            ("--planted", "pairs", "--dense-option", "eps=1", "--dense-option", "eps=2"),
            "dense-option gives eps twice, 1 and 2",
        ),
        ((__file__, "--rating-threshold", "nan"), "--rating-threshold must be a finite number, got nan"),
        ((__file__, "--planted-rows", "10"), "a run on files takes no --planted-rows"),
        (
            (__file__, "--no-shuffle", "--shuffle-window", "10"),
            "a run that does not shuffle takes no --shuffle-window",
        ),
        (
            (__file__, "--drop-column", "user", "--column", "user=categorical"),
            "by --drop-column, and categorical by",
        ),
        (("--planted", "pairs", "--resume"), "resume needs the name of the run: give run-name"),
        (("--planted", "pairs", "--resume", "--run-name", "x"), "there is no run 'x' to resume: runs/x has no config"),
        (("--planted", "pairs", "--resume", "--run-name", "a/b"), "run name 'a/b' is not a plain directory name"),
    ],
)
def test_a_user_error_is_a_sentence_and_exit_code_2(
    recstore: Recstore, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert recstore("train", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_help_names_the_options(recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
    assert recstore("train", "--help") == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--on-bad-line", "--baseline", "--hash-buckets", "--schedule"))


def test_generated_files_can_be_trained_on(
    recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recstore("generate", "train.tsv.gz", "--rows", 3000) == 0
    assert recstore("generate", "test.tsv", "--rows", 500, "--seed", 1) == 0
    assert "500 rows, 2" in capsys.readouterr().out
    assert len((tmp_path / "test.tsv").read_bytes().splitlines()) == 500
    assert recstore("train", tmp_path, "--model", "deepfm", "--epochs", 1) == 0


def test_a_file_that_cannot_be_written_is_an_error(recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
    assert recstore("generate", "absent/train.tsv", "--rows", 10) == 2
    assert "absent" in capsys.readouterr().err
    assert recstore("generate", "train.tsv", "--rows", 0) == 2
    assert "expected at least one row, got 0" in capsys.readouterr().err
