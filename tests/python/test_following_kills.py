"""Publishers and followers that are killed: what is seen is always of one step, and in the end of the last one."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from published_sums import IDS, published, train
from warm_processes import PROCESSES

from recstore_ops.serving import FollowingBundle, load_bundle
from recstore_ops.serving.following.publication import Current

pytestmark = pytest.mark.tier("test")

NAME = "killed publishers"
ROUNDS = int(os.environ.get("RECSTORE_KILL_ROUNDS", "6"))
A_ROUND = 100_000
"""More than the steps of a round."""


def follow(bundle: Path, directory: Path) -> None:
    """Follows until the process is killed."""
    opened = load_bundle(bundle, follow=directory)
    while len(opened(IDS).unique()) == 1:
        pass


def killed_after(
    target: Callable[..., None], arguments: tuple[object, ...], seconds: float, begun: Path, last: str
) -> None:
    """Starts a process and kills it some time after the publication says something else."""
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    end = time.monotonic() + 60
    while begun.read_text() == last and process.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(seconds)
    assert process.is_alive(), f"it ended by itself with {process.exitcode}"
    process.kill()
    process.join()


def test_what_is_seen_is_of_one_step_whoever_is_killed(tmp_path: Path) -> None:
    directory, drawn = tmp_path / "news", random.Random(7)
    _, publisher = published(NAME, directory, 0)
    bundle = tmp_path / "bundle"
    shutil.copytree(directory / Current.read(directory).base.name, bundle)
    publisher.close()
    opened = load_bundle(bundle, follow=directory)
    assert isinstance(opened, FollowingBundle)
    ended, mixed, seen = threading.Event(), [], [0.0]

    def read() -> None:
        while not ended.is_set():
            found = opened(IDS).unique().tolist()
            mixed.extend([found] if len(found) > 1 else [])
            seen.append(found[0])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, ROUNDS + 1):
        said = (directory / "current.json").read_text()
        arguments = (NAME, directory, number * A_ROUND, None)
        killed_after(train, arguments, drawn.random() / 2, directory / "current.json", said)
        if number % 3 == 0:
            follower = PROCESSES.Process(target=follow, args=(bundle, directory))
            follower.start()
            time.sleep(drawn.random())
            follower.kill()
            follower.join()
    last = PROCESSES.Process(target=train, args=(NAME, directory, (ROUNDS + 1) * A_ROUND, 20))
    last.start()
    last.join(60)
    assert last.exitcode == 0
    end = time.monotonic() + 20
    while opened(IDS)[0] != (ROUNDS + 1) * A_ROUND + 20:
        assert time.monotonic() < end, f"{opened(IDS)[0]}: {opened.follower.problem}"
    ended.set()
    reader.join()
    assert not mixed
    assert {int(value) // A_ROUND for value in seen} == set(range(ROUNDS + 2)), "of each round something was seen"
    late = load_bundle(bundle, follow=directory)
    assert late(IDS).equal(opened(IDS))
    assert len(list((directory / "bases").iterdir())) <= 3, "what is older went"
