"""How the processes of a job join and leave it."""

from pathlib import Path

import pytest
from test_train_on_ranks import run, torchrun_of

pytestmark = pytest.mark.tier("test")

RANK = """
import os
import sys
from pathlib import Path

import torch
from recstore_ops.training.run.job import joined_job


def threads():
    return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop\\n")


def train(job):
    model = job.with_mean_gradients(torch.nn.Linear(3, 1))
    model(torch.ones(2, 3)).sum().backward()
    assert threads() > 0
    if sys.argv[1] == "fails":
        raise KeyError("a step")


def run():
    with joined_job() as job:
        train(job)


held = None
try:
    run()
except KeyError as error:
    held = error
# In one piece: the other rank writes to the same pipe.
sys.stdout.write(f"ended with {held!r} and threads: {threads()}\\n")
"""


@pytest.mark.parametrize(("how", "expected"), [("succeeds", "None"), ("fails", "KeyError('a step')")])
@pytest.mark.tier("all")
def test_a_job_that_ends_leaves_no_thread_that_could_abort_the_process(tmp_path: Path, how: str, expected: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    done = run(tmp_path, torchrun_of(2, str(script), how))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"ended with {expected} and threads: 0"] * 2
