"""`recstore train` under torchrun: what several processes train is what one does."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from warm_recstore import WarmRecstore, run_recstore

pytestmark = pytest.mark.tier("test")

IN_ALL = pytest.mark.tier("all")
SECONDS = 240
OPTIONS = ("--planted", "pairs", "--planted-rows", "3000", "--epochs", "2", "--batch-size", "100", "--log-every", "5")


def torchrun(world: int, *options: str, elastic: tuple[str, ...] = (), rows: tuple[str, ...] = OPTIONS) -> list[str]:
    """The command of a run on `world` ranks."""
    return torchrun_of(world, "-m", "recstore_ops.cli", "train", *rows, *options, elastic=elastic)


def torchrun_of(world: int, *program: str, elastic: tuple[str, ...] = ()) -> list[str]:
    """The command that starts a program as each of `world` ranks."""
    job = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(free_port()), *elastic]
    return [sys.executable, *job, *program]


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def evaluations(path: Path) -> list[dict[str, Any]]:
    """What a run recorded of its evaluations."""
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "evaluation"]


def assert_same_figures(path: Path, alone: Path) -> None:
    """Holds the figures of two runs against each other."""
    found, expected = evaluations(path), evaluations(alone)
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for own, other in zip(found, expected, strict=True):
        assert own["table_rows"] == other["table_rows"]
        for part in ("validation", "test"):
            assert own[f"{part}_auc"] == pytest.approx(other[f"{part}_auc"], abs=0.002)
            assert own[f"{part}_logloss"] == pytest.approx(other[f"{part}_logloss"], abs=1e-4)


def run_alone(folder: Path, *options: str) -> None:
    """Trains in one process, the run `alone`."""
    alone = run_recstore("train", *options, "--run-name", "alone", cwd=folder)
    assert alone.returncode == 0, alone.stderr


def run_ranks(
    folder: Path,
    world: int,
    *options: str,
    rows: tuple[str, ...] = OPTIONS,
    environment: Mapping[str, str] | None = None,
) -> tuple[set[int | None], str, str]:
    """Runs `world` ranks as `torchrun` starts them, but without its own process.

    Returns:
        Their exit codes, and what all wrote to the standard output and the standard error.
    """
    job = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job.update(environment or {})
    ranks = [
        WarmRecstore("train", *rows, *options, cwd=folder, env={**job, "RANK": str(rank)}, splits=True)
        for rank in range(world)
    ]
    ended = [rank.ended(SECONDS) for rank in ranks]
    return (
        {rank.returncode for rank in ended},
        "".join(rank.stdout for rank in ended),
        "".join(rank.stderr for rank in ended),
    )


@pytest.mark.tier("all")
@pytest.mark.parametrize(("model", "world"), [("fm", 2), ("deepfm", 1), ("deepfm", 4), ("lr", 2)])
def test_ranks_come_to_the_figures_of_one_process(tmp_path: Path, model: str, world: int) -> None:
    options = ("--model", model, "--optimizer", "adam")
    run_alone(tmp_path, *OPTIONS, *options)
    codes, written, errors = run_ranks(tmp_path, world, *options, "--run-name", "ranks")
    assert codes == {0}, errors
    assert written.count("lowest validation logloss") == 1, "one rank shows what happens"
    assert_same_figures(tmp_path / "runs" / "ranks", tmp_path / "runs" / "alone")


@pytest.mark.tier("all")
def test_ranks_under_torchrun_come_to_the_figures_of_one_process(tmp_path: Path) -> None:
    options = ("--model", "fm", "--optimizer", "adam")
    run_alone(tmp_path, *OPTIONS, *options)
    done = run(tmp_path, torchrun(2, *options, "--run-name", "ranks"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lowest validation logloss") == 1, "one rank shows what happens"
    assert_same_figures(tmp_path / "runs" / "ranks", tmp_path / "runs" / "alone")


FRAPPE = ("--epochs", "2", "--batch-size", "1000", "--log-every", "50", "--model", "deepfm", "--optimizer", "adam")
IN_LONG_RUNS = pytest.mark.skipif(not os.environ.get("RECSTORE_LONG_TESTS"), reason="make test-long runs it")


@pytest.fixture(scope="module")
def alone_on_frappe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `alone` on Frappe, trained once."""
    root = os.environ.get("RECSTORE_DATA")
    if root is None:
        pytest.skip("RECSTORE_DATA is not set: no real data sets to test on")
    folder = tmp_path_factory.mktemp("frappe")
    run_alone(folder, str(Path(root) / "frappe"), *FRAPPE)
    return folder


@pytest.mark.tier("all")
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=IN_LONG_RUNS)])
def test_deepfm_comes_to_the_auc_of_one_process_on_frappe(
    tmp_path: Path, data_root: Path, alone_on_frappe: Path, world: int
) -> None:
    rows = (str(data_root / "frappe"), *FRAPPE)
    codes, _, errors = run_ranks(tmp_path, world, "--run-name", "ranks", rows=rows)
    assert codes == {0}, errors
    found, expected = (
        evaluations(folder / "runs" / name)[-1] for folder, name in ((tmp_path, "ranks"), (alone_on_frappe, "alone"))
    )
    assert found["table_rows"] == expected["table_rows"]
    assert found["test_auc"] == pytest.approx(expected["test_auc"], abs=0.002)
    assert found["test_auc"] > 0.9


@pytest.mark.parametrize(
    ("killed", "last"),
    [([(2, 10)], 1), pytest.param([(2, 10), (3, 25), (1, 40)], 2, marks=IN_ALL)],
    ids=["one without torchrun", "more and fewer"],
)
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, killed: list[tuple[int, int]], last: int) -> None:
    options = ("--model", "deepfm", "--save-every", "10")
    run_alone(tmp_path, *OPTIONS, *options)
    named = (*options, "--run-name", "parts")
    for number, (world, step) in enumerate(killed):
        process = subprocess.Popen(torchrun(world, *named, *(["--resume"] if number else [])), cwd=tmp_path)
        _wait_for_step(tmp_path / "runs" / "parts", step, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) != 0
    if last == 1:
        alone = run_recstore("train", *OPTIONS, *named, "--resume", cwd=tmp_path)
        assert alone.returncode == 0, alone.stderr
    else:
        done = run(tmp_path, torchrun(last, *named, "--resume"))
        assert done.returncode == 0, done.stderr
    assert_same_figures(tmp_path / "runs" / "parts", tmp_path / "runs" / "alone")


def _wait_for_step(path: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    """Waits until a run has saved a step beyond `step`."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, "the run has not ended before"
        manifest = path / "checkpoint" / "manifest.json"
        if manifest.is_file() and json.loads(manifest.read_text())["snapshots"][-1]["metadata"]["step"] >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not saved within {SECONDS} seconds")


def _rank_processes(parent: int) -> list[int]:
    """The processes that torchrun started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if "recstore_ops" in Path(f"/proc/{child}/cmdline").read_text()]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.tier("all")
def test_a_killed_rank_is_started_anew_and_the_run_goes_on(tmp_path: Path, number: int) -> None:
    options = ("--model", "fm", "--save-every", "5")
    whole = run(tmp_path, torchrun(2, *options, "--run-name", "whole"))
    assert whole.returncode == 0, whole.stderr
    command = torchrun(2, *options, "--run-name", "killed", elastic=("--max-restarts", "1"))
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said)
        _wait_for_step(tmp_path / "runs" / "killed", 15, process)
        os.kill(_rank_processes(process.pid)[number], signal.SIGKILL)
        assert process.wait(SECONDS) == 0, (tmp_path / "said").read_text()
    text = (tmp_path / "said").read_text()
    assert re.search(r"going on after step \d+", text), text
    assert_same_figures(tmp_path / "runs" / "killed", tmp_path / "runs" / "whole")


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (("--tables", "nn"), {}, "tables of nn.Embedding cannot be sharded over 2 processes"),
        (("--baseline", "nn"), {}, "a comparison with a baseline is of one process: start it without torchrun"),
        ((), {"TORCHELASTIC_MAX_RESTARTS": "1"}, "with --max-restarts a run needs --run-name, by which it goes on"),
        (("--run-name", "none", "--resume"), {}, "the first process of the job could not begin; its own error tells"),
    ],
)
@pytest.mark.tier("all")
def test_what_ranks_cannot_do_ends_all_of_them(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    codes, _, errors = run_ranks(tmp_path, 2, *options, environment=environment)
    assert 0 not in codes
    assert message in errors


@pytest.mark.tier("all")
def test_what_ranks_cannot_do_ends_torchrun(tmp_path: Path) -> None:
    done = run(tmp_path, torchrun(2, elastic=("--max-restarts", "1")))
    assert done.returncode != 0
    assert "with --max-restarts a run needs --run-name, by which it goes on" in done.stderr, done.stderr
