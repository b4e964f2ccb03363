"""The examples: each runs on its own, reaches the figures it claims, and stays short enough to copy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("test")

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_file())


def output_of(name: str, folder: Path) -> str:
    """Runs an example from within `folder` and returns what it prints."""
    command = [sys.executable, str(EXAMPLES / name)]
    # Threads gain nothing on small batches, and wait for each other where the cores are busy.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def columns(output: str) -> list[list[float]]:
    """The numbers of the lines of a table: those that begin with a number."""
    lines = [line for line in output.splitlines() if re.match(r" +\d", line)]
    return [[float(number) for number in re.findall(r"[\d.]+", line)] for line in lines]


@pytest.mark.tier("all")
def test_both_bags_have_the_same_losses(tmp_path: Path) -> None:
    output = output_of("embedding_bag.py", tmp_path)
    rows = columns(output)
    assert [step for step, _, _ in rows] == [0, 20, 40, 60, 80, 99]
    assert all(theirs == pytest.approx(ours, abs=2e-6) for _, theirs, ours in rows)


@pytest.mark.tier("all")
def test_the_torchrec_model_trains(tmp_path: Path) -> None:
    output = output_of("from_torchrec.py", tmp_path)
    first, last = map(float, re.findall(r"ten (?:steps )?(\d\.\d+)", output))
    assert last < first - 0.05
    assert ("TorchRec is not installed" in output) != ("difference to TorchRec" in output)


@pytest.mark.tier("all")
def test_online_learning_meets_new_ids_and_stays_ahead(tmp_path: Path) -> None:
    days = columns(output_of("online_learning.py", tmp_path))
    assert [day for day, *_ in days] == list(range(1, 8))
    rows, unseen, losses, aucs, frozen = (list(column) for column in list(zip(*days, strict=True))[1:])
    assert rows == sorted(set(rows))
    assert all(share > 10 for share in unseen)
    assert losses[-1] < losses[0]
    assert aucs[0] == frozen[0]
    assert all(online > standing + 0.02 for online, standing in zip(aucs[1:], frozen[1:], strict=True))


@pytest.mark.tier("all")
def test_the_factorization_machine_finds_the_pairs(tmp_path: Path) -> None:
    output = output_of("fm_by_hand.py", tmp_path)
    _, linear, machine = columns(output)[-1]
    bayes = float(output.split()[-1])
    assert linear < 0.7
    assert bayes - 0.03 < machine < bayes


@pytest.mark.tier("all")
def test_workers_on_ray_learn_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    rounds = columns(output_of("ray_training.py", tmp_path))
    losses = [loss for _, loss in rounds]
    assert [number for number, _ in rounds] == [0, 1, 2, 3]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.tier("all")
def test_workers_that_push_and_pull_come_near_the_best_and_keep_few_weights(tmp_path: Path) -> None:
    output = output_of("kv_worker.py", tmp_path)
    _, score, zeros = columns(output)[-1]
    assert abs(score - float(output.split()[-1])) < 0.01
    assert zeros > 0.8


@pytest.mark.tier("all")
def test_a_gpt_that_remembers_n_grams_is_ahead(tmp_path: Path) -> None:
    losses = columns(output_of("ngram_memory.py", tmp_path))
    (_, *beginning), (_, without, remembering) = losses[0], losses[-1]
    assert beginning[0] == beginning[1]
    assert remembering < without - 1


@pytest.mark.tier("all")
def test_embeddings_of_a_graph_that_grows_come_near_the_best_prediction(tmp_path: Path) -> None:
    reports = columns(output_of("node_embeddings.py", tmp_path))
    rows, in_memory, on_disk, _, old, best_of_old, new, best_of_new = reports[-1]
    assert rows == in_memory + on_disk
    assert rows > 19_900
    assert on_disk > rows / 3
    assert abs(best_of_old - old) < 0.01
    assert abs(best_of_new - new) < 0.01
    # Nodes that have not come yet are no better than chance, and have no row.
    assert [report[0] <= 10_000 for report in reports] == [True] * 3 + [False] * 6
    assert all(abs(report[6] - 0.5) < 0.02 for report in reports[:3])


@pytest.mark.parametrize("name", FILES)
def test_every_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.parametrize("name", [name for name in FILES if name != "README.md"])
def test_every_example_is_listed(name: str) -> None:
    assert f"[{name}]({name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_every_python_example_runs_here() -> None:
    """A new example needs a test of its own above."""
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'output_of("{name}"' in source for name in FILES if name.endswith(".py"))
