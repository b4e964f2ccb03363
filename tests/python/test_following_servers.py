"""Publications of models whose tables lie on servers: every change, servers that are killed, a later publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from served_tables import ServerProcesses
from test_following import IDS, Clicks, answer, caught_up, followed, train

from recstore_ops import servers, set_ps_servers
from recstore_ops.ops import operators
from recstore_ops.serving import Publisher, publish

pytestmark = [pytest.mark.tier("test"), pytest.mark.embedded_only("it has servers of its own")]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServerProcesses]:
    """Two servers with a log, on which tables are opened."""
    with ServerProcesses(tmp_path, 2, "--data", str(tmp_path / "data"), "--durability", "wal") as processes:
        set_ps_servers(processes.addresses, timeout=5)
        yield processes
        servers.set_ps_backend("embedded")


@pytest.fixture
def clicks(served: ServerProcesses, table_name: Callable[[], str]) -> Clicks:
    return Clicks(table_name(), table_name(), optimizer={"kind": "adagrad"})


@pytest.fixture
def publisher(clicks: Clicks, tmp_path: Path) -> Iterator[Publisher]:
    train_alone(clicks)
    with publish(clicks, (IDS,), tmp_path / "news", interval=0) as publisher:
        yield publisher


class NoPublisher:
    """What takes steps and publishes none."""

    def step(self) -> None:
        """Does nothing."""


def train_alone(clicks: Clicks) -> None:
    train(clicks, NoPublisher(), 3)  # pyright: ignore[reportArgumentType]


def test_what_changes_on_servers_is_seen_to_the_bit(clicks: Clicks, publisher: Publisher, tmp_path: Path) -> None:
    bundle = followed(publisher, tmp_path)
    assert bundle(IDS).equal(answer(clicks))
    for steps in (1, 20):
        train(clicks, publisher, steps)
        operators.hashtable_delete(clicks.user.table.handle, torch.arange(steps, steps + 9))
        publisher.step()
        caught_up(bundle, publisher)
        for ids in (IDS, torch.randint(-5, 80, (64, 2))):
            assert bundle(ids).equal(answer(clicks, ids))
    assert bundle.follower.problem is None


def test_a_server_that_was_killed_tells_all_rows_again(
    clicks: Clicks, publisher: Publisher, served: ServerProcesses, tmp_path: Path
) -> None:
    bundle, history = followed(publisher, tmp_path), None
    for shard in (0, 1):
        history = bundle.follower.update.history
        train(clicks, publisher, 5)
        served.kill_and_start_again(shard)
        train(clicks, publisher, 5)
        publisher.update()
        caught_up(bundle, publisher)
        assert bundle.follower.update.history != history, "it begins with a new base"
        ids = torch.randint(-5, 80, (64, 2))
        assert bundle(ids).equal(answer(clicks, ids))


def test_the_later_publisher_counts(clicks: Clicks, publisher: Publisher, tmp_path: Path) -> None:
    with publish(clicks, (IDS,), tmp_path / "later", interval=0) as later:
        with pytest.raises(RuntimeError, match=r"publish: table .* is published already: close the other publisher"):
            train(clicks, publisher, 1)
        bundle = followed(later, tmp_path)
        train(clicks, later, 3)
        assert caught_up(bundle, later)(IDS).equal(answer(clicks))
    bundle = followed(publisher, tmp_path)
    train(clicks, publisher, 1)
    assert caught_up(bundle, publisher)(IDS).equal(answer(clicks)), "it begins anew once the later one has ended"


def test_servers_that_do_not_answer_lose_nothing(
    clicks: Clicks, publisher: Publisher, served: ServerProcesses, tmp_path: Path
) -> None:
    bundle = followed(publisher, tmp_path)
    train_alone(clicks)
    served.processes[1].kill()
    with pytest.raises(RuntimeError, match=r"publish: .*shard 1"):
        publisher.step()
    served.processes[1].communicate(timeout=60)
    served.processes[1] = served._start(1, "--port", served.addresses[1].rsplit(":", 1)[1])
    served._started(served.processes[1])
    publisher.update()
    caught_up(bundle, publisher)
    assert bundle(IDS).equal(answer(clicks))
