"""Training runs that are saved, killed, stopped and resumed: they end as one that ran through."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_kinds import KINDS
from saved_runs import Signals, metrics_of, rows_of, run_train, state_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import drop_tables

from recstore_ops import checkpoint
from recstore_ops.config.directory import Directory
from recstore_ops.training import TrainingConfig, build_model, evaluate, open_input, planted_interactions
from recstore_ops.training.data.sparse_lines import write_libsvm
from recstore_ops.training.run.checkpoints import mirror_checkpoint

pytestmark = pytest.mark.tier("test")

IN_ALL = pytest.mark.tier("all")
OPTIMIZERS = [
    *(pytest.param(name, marks=IN_ALL) for name in KINDS if name != "adam"),
    "adam",
]
# 60 steps in 3 epochs, with evaluations, saves and records that lie across each other.
OPTIONS = (
    *("train.libfm", "--test", "test.libfm", "--model", "deepfm", "--dropout", 0.2, "--batch-size", 48),
    *("--epochs", 3, "--patience", 0, "--evaluate-every", 7, "--log-every", 4),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files with a run on them, `whole`; only to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    planted = planted_interactions(0, 1003, 500)
    write_libsvm(folder / "train.libfm", planted.train)
    write_libsvm(folder / "test.libfm", planted.test)
    assert run_train(folder, (*OPTIONS, "--run-name", "whole")) == (0, "")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of `whole`."""
    return Path(shutil.copytree(whole, tmp_path / "folder"))


def assert_equal_runs(one: Path, other: Path) -> None:
    assert metrics_of(one) == metrics_of(other)
    for part in ("checkpoint", "best"):
        rows = rows_of(one / part)
        assert all(tensors["rows"] for tensors in rows.values())
        assert rows == rows_of(other / part)
        torch.testing.assert_close(state_of(one / part), state_of(other / part), rtol=0, atol=0)


def kill_and_resume(folder: Path, options: tuple[object, ...], kills: list[int]) -> None:
    """Runs `killed`, which is killed before so many steps of each of its processes, to its end."""
    named = (*options, "--run-name", "killed")
    for number, step in enumerate(kills):
        resume = ("--resume",) if number else ()
        assert run_train(folder, (*named, *resume), Signals(step))[0] == -signal.SIGKILL
    code, error = run_train(folder, (*named, "--resume"))
    assert (code, error) == (0, "")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_run_ends_as_one_that_ran_through(small_files: Path, optimizer: str) -> None:
    options = (*OPTIONS, "--optimizer", optimizer, "--save-every", 5, "--schedule", "cosine", "--warmup-steps", 9)
    options = (*options, "--admit-after", 2, "--ttl", 30, "--capacity", 60, "--eviction-interval", 4)
    options = (*options, "--shared-rows", 9, "--memory-limit", "48KiB", "--disk", ".")
    assert run_train(small_files, (*options, "--run-name", "whole"))[0] == 0
    draw = random.Random(optimizer)
    kill_and_resume(small_files, options, [draw.randint(2, 20) for _ in range(2)])
    assert_equal_runs(small_files / "runs" / "whole", small_files / "runs" / "killed")
    tables: Any = newest(small_files / "runs" / "whole" / "checkpoint")["tables"]
    assert all(table["progress"]["rejections"] > 0 < table["progress"]["evictions"] for table in tables)


@pytest.mark.parametrize(
    "further",
    [
        ("--cache-mb", 0, "--shuffle-window", 100, "--schedule", "linear", "--row-type", "bfloat16"),
        pytest.param(
            ("--schedule", "plateau", "--lr", 0.1, "--auc-by", "field_0", "--no-shuffle", "--dense-optimizer", "adamw"),
            marks=IN_ALL,
        ),
        pytest.param(("--validation-fraction", 0, "--schedule", "exponential"), marks=IN_ALL),
        pytest.param(("--tables", "nn", "--schedule", "cosine"), marks=IN_ALL),
    ],
    ids=["streamed", "plateau", "without validation", "nn"],
)
def test_other_runs_go_on_as_well(small_files: Path, further: tuple[object, ...]) -> None:
    options = (*OPTIONS, *further, "--save-every", 3)
    assert run_train(small_files, (*options, "--run-name", "whole"))[0] == 0
    kill_and_resume(small_files, options, [11, 22])
    assert_equal_runs(small_files / "runs" / "whole", small_files / "runs" / "killed")


def test_a_run_killed_before_its_first_save_begins_anew(folder: Path) -> None:
    # Before the first evaluation: whatever was recorded counts again.
    kill_and_resume(folder, OPTIONS, [6, 7])
    assert "note: the run ended before it was saved: beginning anew" in (folder / "stdout").read_text()
    assert_equal_runs(folder / "runs" / "whole", folder / "runs" / "killed")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_the_run(folder: Path, number: int, code: int) -> None:
    named = (*OPTIONS, "--run-name", "stopped")
    ended, error = run_train(folder, named, Signals(3, (number,)))
    name = signal.Signals(number).name
    assert ended == code
    assert error.splitlines() == [
        f"recstore: {name}: saving after this step; a second signal ends the run at once, unsaved",
        f"recstore: stopped by {name} and saved after step 3; --resume goes on",
    ]
    assert state_of(folder / "runs" / "stopped" / "checkpoint")["step"] == 3
    assert run_train(folder, (*named, "--resume")) == (0, "")
    assert "note: going on after step 3, in epoch 1" in (folder / "stdout").read_text()
    assert_equal_runs(folder / "runs" / "whole", folder / "runs" / "stopped")


def test_a_second_signal_ends_the_run_at_once(small_files: Path) -> None:
    signals = Signals(3, (signal.SIGTERM, signal.SIGTERM))
    ended, error = run_train(small_files, (*OPTIONS, "--run-name", "ended"), signals)
    assert ended == -signal.SIGTERM
    assert "stopped by" not in error
    assert not (small_files / "runs" / "ended" / "checkpoint").exists()


def test_the_model_is_in_the_end_that_of_the_best_evaluation(small_files: Path) -> None:
    # Learns by heart soon.
    options = ("train.libfm", "--epochs", 8, "--lr", 0.3, "--patience", 2, "--validation-fraction", 0.3)
    assert run_train(small_files, (*options, "--run-name", "long"))[0] == 0
    lines = metrics_of(small_files / "runs" / "long")
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    best = min(evaluations, key=lambda line: line["validation_logloss"])
    assert len(evaluations) == best["number"] + 2
    assert [line for line in lines if line["event"] == "best"] == [
        {"event": "best", "number": best["number"], "epoch": best["epoch"], "step": best["step"]}
    ]
    short = ("--epochs", best["number"], "--run-name", "short")
    assert run_train(small_files, (*options, *short))[0] == 0
    of_best, of_short = small_files / "runs" / "long" / "best", small_files / "runs" / "short" / "checkpoint"
    assert rows_of(of_best) == rows_of(of_short)
    assert rows_of(of_best) != rows_of(small_files / "runs" / "long" / "checkpoint")
    torch.testing.assert_close(state_of(of_best)["model"], state_of(of_short)["model"], rtol=0, atol=0)


def test_a_model_with_the_best_checkpoint_has_its_figures(folder: Path) -> None:
    files = folder / "train.libfm", folder / "test.libfm"
    config = TrainingConfig(train=files[:1], test=files[1:], model="deepfm", dropout=0.2)
    rows = open_input(config)
    assert rows.test is not None
    path = folder / "runs" / "whole" / "best"
    try:
        model = build_model(config, "deepfm", rows.train)
        report = checkpoint.load(path)
        model.load_state_dict(torch.load(path / report.metadata["dense"])["model"], strict=False)
        logloss = evaluate(model, rows.test).logloss
    finally:
        drop_tables("deepfm")
    best, *evaluations = sorted(
        (line for line in metrics_of(folder / "runs" / "whole") if line["event"] == "evaluation"),
        key=lambda line: line["validation_logloss"],
    )
    assert logloss == pytest.approx(best["test_logloss"], abs=1e-7)
    assert all(abs(logloss - line["test_logloss"]) > 1e-6 for line in evaluations)


RESUMED = (*OPTIONS, "--run-name", "whole", "--resume")


def assert_refused(folder: Path, options: tuple[object, ...], message: str) -> None:
    """Holds that a run ends with one sentence, and changes nothing that was recorded."""
    metrics = (folder / "runs" / "whole" / "metrics.jsonl").read_text()
    code, error = run_train(folder, options)
    assert (code, error) == (2, f"recstore: {message}\n")
    assert (folder / "runs" / "whole" / "metrics.jsonl").read_text() == metrics


def test_a_finished_run_stays_as_it_is(folder: Path) -> None:
    run = folder / "runs" / "whole"
    before = Path(shutil.copytree(run, folder / "before"))
    assert run_train(folder, RESUMED) == (0, "")
    assert "note: the run was finished after step 60" in (folder / "stdout").read_text()
    assert_equal_runs(before, run)


def test_a_run_is_resumed_with_the_options_that_it_began_with(folder: Path) -> None:
    message = "run 'whole' has --batch-size 48, got 50: a run is resumed with the options that it began with"
    assert_refused(folder, (*RESUMED, "--batch-size", 50), message)


def test_a_file_that_has_changed_is_refused(folder: Path) -> None:
    before = (folder / "train.libfm").stat().st_size
    with open(folder / "train.libfm", "a") as file:
        file.write("1 3:1\n")
    message = f"train.libfm had {before:,} bytes when the run was saved, now it has {before + 6:,}"
    assert_refused(folder, RESUMED, message)


def test_a_run_that_is_under_way_is_refused(folder: Path) -> None:
    with open(folder / "runs" / "whole" / "config.json") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert_refused(folder, RESUMED, "run 'whole' is under way in another process")


def test_lost_metrics_are_an_error(folder: Path) -> None:
    path = folder / "runs" / "whole" / "metrics.jsonl"
    os.truncate(path, 100)
    code, error = run_train(folder, RESUMED)
    assert code == 2
    assert "metrics.jsonl has lost lines: expected at least" in error
    assert "got 100" in error


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "is damaged: "),
        (lambda path: path.write_bytes(b""), "is damaged: "),
        (lambda path: path.unlink(), "runs/whole/checkpoint is not of a training run, or is damaged: there is no file"),
    ],
    ids=["cut", "empty", "missing"],
)
def test_a_damaged_dense_file_is_an_error(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    path = folder / "runs" / "whole" / "checkpoint"
    damage(path / newest(path)["metadata"]["dense"])
    code, error = run_train(folder, RESUMED)
    assert code == 2
    assert error.startswith("recstore: ")
    assert message in error


def test_a_damaged_table_file_is_an_error(folder: Path) -> None:
    for path in (folder / "runs" / "whole" / "checkpoint").glob("*.safetensors"):
        path.write_bytes(b"")
    code, error = run_train(folder, RESUMED)
    assert code == 2
    assert error.startswith("recstore: the run cannot go on: ")
    assert ".safetensors" in error


def test_a_damaged_manifest_is_an_error(folder: Path) -> None:
    (folder / "runs" / "whole" / "checkpoint" / "manifest.json").write_text("{}")
    assert_refused(folder, RESUMED, "runs/whole/checkpoint/manifest.json is damaged: it tells no snapshots")


@pytest.mark.parametrize(("largest_file", "which"), [(60_000, "dense-"), (300_000, "fm_v.safetensors")])
def test_a_run_that_cannot_be_saved_says_so(small_files: Path, largest_file: int, which: str) -> None:
    options = ("--planted", "pairs", "--planted-rows", 20_000, "--model", "fm", "--dim", 64, "--batch-size", 5000)
    code, error = run_train(small_files, (*options, "--run-name", "full"), largest_file=largest_file)
    assert code == 2
    assert error.startswith("recstore: the run could not be saved: ")
    assert "runs/full/checkpoint/" in error
    assert which in error


def test_what_a_run_knows_besides_tables_has_no_rows_of_tables(folder: Path) -> None:
    model = state_of(folder / "runs" / "whole" / "checkpoint")["model"]
    layers = [f"deep.{layer}.{name}" for layer in (0, 3, 6) for name in ("weight", "bias")]
    assert set(model) == {"fm.linear.bias", *layers}


def test_keep_is_the_number_of_full_snapshots(small_files: Path) -> None:
    options = ("train.libfm", "--batch-size", 100, "--epochs", 4, "--save-every", 1, "--keep", 3, "--run-name", "kept")
    assert run_train(small_files, options) == (0, "")
    path = small_files / "runs" / "kept" / "checkpoint"
    snapshots = json.loads((path / "manifest.json").read_text())["snapshots"]
    full = [snapshot for snapshot in snapshots if snapshot["parent"] is None]
    assert len(full) == 3
    assert len(snapshots) > len(full), "some saves in between are deltas"
    needed = {snapshot["metadata"]["dense"] for snapshot in snapshots}
    assert {file.name for file in path.glob("dense-*")} == needed


def test_the_best_is_kept_if_the_run_ended_right_before(folder: Path) -> None:
    # As if a later evaluation were the best, was saved, and the run was killed before it was kept.
    run = folder / "runs" / "whole"
    mirror_checkpoint(run / "best", run / "checkpoint")
    best = rows_of(run / "checkpoint")
    shutil.rmtree(run / "best")
    assert run_train(folder, RESUMED) == (0, "")
    assert rows_of(run / "best") == best


def test_tensorboard_shows_no_step_twice(small_files: Path) -> None:
    kill_and_resume(small_files, (*OPTIONS, "--save-every", 10), [16])
    run = small_files / "runs" / "killed"
    assert len(list(run.glob("events.out.tfevents.*"))) == 2
    accumulator = EventAccumulator(str(run))
    accumulator.Reload()
    steps = [line["step"] for line in metrics_of(run) if line["event"] == "steps"]
    assert [event.step for event in accumulator.Scalars("train/loss")] == steps


class TestMirroring:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        path = tmp_path / "source"
        path.mkdir()
        for name in ("one", "dense", ".lock"):
            (path / name).write_text(f"first {name}")
        write_manifest(path, "one")
        return path

    @pytest.mark.parametrize("has_links", [True, False])
    def test_the_copy_stays_when_the_source_goes_on(
        self, source: Path, tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: object) -> None:
            raise PermissionError("no links here")

        if not has_links:
            monkeypatch.setattr(Directory, "link", refuse)
        target = tmp_path / "target"
        mirror_checkpoint(source, target)
        first = (source / "manifest.json").read_text()
        (source / "one").unlink()
        (source / "two").write_text("second two")
        write_manifest(source, "two")
        dense = {"dense": "first dense"}
        assert content_of(target) == {"manifest.json": first, "one": "first one", **dense}
        (target / "notes.txt").write_text("of somebody else")
        mirror_checkpoint(source, target)
        second = (source / "manifest.json").read_text()
        assert content_of(target) == {
            **{"manifest.json": second, "two": "second two", "notes.txt": "of somebody else"},
            **dense,
        }
        assert (target / "two").samefile(source / "two") == has_links

    def test_what_was_cut_off_is_cleared_away_by_the_next(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def cut_off(directory: Directory, name: str, data: bytes) -> None:
            if name == "manifest.json":
                raise KeyboardInterrupt
            replace(directory, name, data)

        target, replace = tmp_path / "target", Directory.replace
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "replace", cut_off)
            with pytest.raises(KeyboardInterrupt):
                mirror_checkpoint(source, target)
        assert {"one", "dense"} < content_of(target).keys()
        (source / "one").unlink()
        (source / "two").write_text("second two")
        write_manifest(source, "two")
        mirror_checkpoint(source, target)
        assert content_of(target).keys() == {"manifest.json", "dense", "two"}

    @pytest.mark.parametrize("place", ["source", "target"])
    @pytest.mark.parametrize("name", ["one", "manifest.json"])
    def test_a_link_in_either_is_refused(self, source: Path, tmp_path: Path, name: str, place: str) -> None:
        target, outside = tmp_path / "target", tmp_path / "outside"
        outside.write_text("of somebody else")
        if place == "target":
            mirror_checkpoint(source, target)
            (source / "two").write_text("second two")
            write_manifest(source, "two")
        (tmp_path / place / name).unlink()
        (tmp_path / place / name).symlink_to(outside)
        with pytest.raises(OSError, match="it is a symbolic link") as refused:
            mirror_checkpoint(source, target)
        assert refused.value.filename == str(tmp_path / place / name)
        assert outside.read_text() == "of somebody else"


def write_manifest(path: Path, file: str) -> None:
    """As if a run had saved a table in one file."""
    snapshot = {"metadata": {"dense": "dense"}, "tables": [{"shards": [{"file": file}]}]}
    (path / "manifest.json").write_text(json.dumps({"snapshots": [snapshot]}))


def content_of(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


def newest(path: Path) -> dict[str, dict[str, str]]:
    return json.loads((path / "manifest.json").read_text())["snapshots"][-1]
