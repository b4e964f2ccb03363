"""Runs of `recstore train` in which a file is a link, a FIFO or a directory: it is named, and nothing is changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hostile_files import HOSTILE, assert_untouched, make_outside, put_in_place, tree
from saved_runs import run_train
from warm_recstore import run_recstore

from recstore_ops.training import planted_interactions
from recstore_ops.training.data.sparse_lines import write_libsvm

pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.embedded_only("runs have tables of their own"),
]

OPTIONS = ("train.libfm", "--test", "test.libfm", "--batch-size", 200, "--run-name", "run")
WAY = "a run may lie on another disk as a whole"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    planted = planted_interactions(0, 600, 100)
    write_libsvm(folder / "train.libfm", planted.train)
    write_libsvm(folder / "test.libfm", planted.test)
    assert run_train(folder, (*OPTIONS, "--epochs", 1)) == (0, "")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, beside a directory that links lead to."""
    make_outside(tmp_path / "outside")
    return Path(shutil.copytree(trained, tmp_path / "folder"))


def resume(folder: Path) -> str | None:
    """What `train --resume` of a further epoch, or of the same, is refused with."""
    code, said = run_train(folder, (*OPTIONS, "--epochs", 1, "--resume"))
    return said if code else None


def evaluate(folder: Path) -> str | None:
    """What `evaluate` is refused with."""
    done = run_recstore("evaluate", "runs/run", "test.libfm", cwd=folder)
    return done.stderr if done.returncode else None


def check(folder: Path, name: str, kind: str, command: str) -> None:
    """Puts something in the place of a file of the run, and checks that the command refuses it."""
    run, outside = folder / "runs" / "run", folder.parent / "outside"
    put_in_place(run / name, kind, outside)
    before = tree(run)
    said = resume(folder) if command == "resume" else evaluate(folder)
    assert_untouched(outside)
    if kind == "directory":
        assert said is None or name.rsplit("/", 1)[-1] in said.replace("\n", ""), said
        return
    assert said is not None, name
    assert "Traceback" not in said
    assert tree(run) == before
    told = "".join(said.replace("│", "").split())
    assert name.rsplit("/", 1)[-1] in told, said


def names_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*"))


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("command", ["resume", "evaluate"])
def test_every_file_of_a_run(trained: Path, tmp_path: Path, command: str, kind: str) -> None:
    make_outside(tmp_path / "outside")
    for name in names_of(trained / "runs" / "run"):
        if kind == "directory" and (trained / "runs" / "run" / name).is_dir():
            continue
        folder = Path(shutil.copytree(trained, tmp_path / "folder"))
        check(folder, name, kind, command)
        shutil.rmtree(folder)


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint", "best"])
def test_a_link_in_a_run_is_refused_before_anything_changes(folder: Path, name: str) -> None:
    check(folder, name, "link", "resume")


@pytest.mark.tier("test")
def test_files_of_others_in_a_run_stay(folder: Path) -> None:
    run = folder / "runs" / "run"
    others = [run / "notes.txt", run / "checkpoint" / "dense-notes.pt", run / "best" / "notes.txt"]
    for path in others:
        path.write_text("of somebody else")
    locks = [run / ".#config.json", run / "best" / ".#notes.txt"]
    for lock in locks:
        lock.symlink_to("somebody@machine.1234")
    assert resume(folder) is None
    assert evaluate(folder) is None
    assert all(lock.is_symlink() for lock in locks)
    assert all(path.read_text() == "of somebody else" for path in others)


@pytest.mark.tier("test")
def test_a_run_may_lie_elsewhere_as_a_whole(folder: Path) -> None:
    (folder / "runs" / "run").rename(folder / "elsewhere")
    (folder / "runs" / "run").symlink_to(folder / "elsewhere")
    assert resume(folder) is None
    assert evaluate(folder) is None
    (folder / "elsewhere" / "checkpoint").rename(folder / "moved")
    (folder / "elsewhere" / "checkpoint").symlink_to(folder / "moved")
    said = resume(folder)
    assert said is not None
    assert "".join(WAY.split()) in "".join(said.replace("│", "").split())
