"""Servers on a Ray cluster: actors and nodes that end in the middle of training change nothing."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
ray = pytest.importorskip("ray", reason="Ray is not installed")

from ray.cluster_utils import Cluster  # noqa: E402

import recstore_ops.ray as on_ray  # noqa: E402
from recstore_ops import DistEmbedding, SparseOptimizer, servers  # noqa: E402

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]

# Nodes that end are noticed within ten seconds instead of half a minute.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 8}
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node, to which a test adds others."""
    head = {**NODE, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _embedded_again() -> Iterator[None]:
    yield
    on_ray.disconnect()
    servers.set_ps_backend("embedded")


def trained(name: str, between: Callable[[int], None]) -> torch.Tensor:
    """The rows after twelve steps, `between` called with the number of each one before it."""
    module = DistEmbedding(None, 4, name, optimizer="adam", lr=0.1)
    optimizer = SparseOptimizer(modules=[module])
    for step in range(12):
        between(step)
        module(torch.arange(step, step + 50)).square().sum().backward()
        optimizer.step()
    return module(torch.arange(70)).detach()


@pytest.mark.tier("all")
def test_actors_and_a_node_that_end_while_training_change_nothing(
    cluster: Cluster, tmp_path: Path, table_name: TableName
) -> None:
    name, own = table_name(), tmp_path / "node"
    expected = trained(name, lambda _: None)
    own.mkdir()
    node = cluster.add_node(**NODE, plasma_directory=str(own))
    started = on_ray.start_servers(4, data=tmp_path / "shared", insecure=True)
    try:
        places = {shard: _node_of(started, shard) for shard in range(4)}
        assert sorted(list(places.values()).count(place) for place in set(places.values())) == [2, 2]
        lost = {shard for shard, place in places.items() if place == node.node_id}
        began = started.addresses()
        started.use()

        def disturb(step: int) -> None:
            if step == 4:
                ray.kill(started.shards[1], no_restart=False)
                _wait_for(lambda: _is_gone(began[1]))
            if step == 6:
                ray.kill(started._book, no_restart=False)
            if step == 8:
                there = [address for shard, address in enumerate(started.addresses()) if shard in lost]
                cluster.remove_node(node, allow_graceful=False)
                shutil.rmtree(own)
                _wait_for(lambda: all(map(_is_gone, there)))

        assert torch.equal(trained(name, disturb), expected)
        restarts = started.restarts()
        assert {restart.shard for restart in restarts} == lost | {1}
        assert {restart.restored_from for restart in restarts} == {None}
        assert all(
            now != before
            for shard, (now, before) in enumerate(zip(started.addresses(), began, strict=True))
            if shard in lost
        )
        assert {_node_of(started, shard) for shard in range(4)} == {places[min(set(places) - lost)]}
    finally:
        started.stop()


def _node_of(started: on_ray.Servers, shard: int) -> str:
    """The node that a shard is on."""
    wanted = started.shards[shard]._actor_id.hex()
    return ray._private.state.actors(wanted)["Address"]["NodeID"]


@pytest.mark.tier("all")
def test_what_a_shard_without_a_log_loses_is_told(
    cluster: Cluster, table_name: TableName, caplog: pytest.LogCaptureFixture
) -> None:
    started = on_ray.start_servers(1, durability="checkpoint", insecure=True, name="lost")
    try:
        started.use()
        module = DistEmbedding(None, 2, table_name())
        module(torch.arange(3))
        with caplog.at_level(logging.INFO, "recstore_ops.ray"):
            ray.kill(started.shards[0], no_restart=False)
            # It may answer a little longer.
            with pytest.raises(
                RuntimeError, match=r"it was (restarted since its tables were opened|started without the rows)"
            ):
                _wait_for(lambda: module(torch.arange(3)) is None)
            _wait_for(lambda: bool(caplog.messages))
        (restart,) = started.restarts()
        assert caplog.messages == [str(restart)]
        assert str(restart).endswith(f"again at {started.addresses()[0]} from nothing: what came after is lost")
    finally:
        started.stop()
    with pytest.raises(ValueError, match="lost"):
        on_ray.connect("lost")


def _is_gone(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return True
    return False


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.tier("all")
def test_servers_that_have_no_room_or_cannot_start_leave_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no room in the cluster for 1 shards of \{'CPU': 99"):
            on_ray.start_servers(1, data=tmp_path, resources_per_shard={"CPU": 99}, timeout=0.5)
    (tmp_path / "shard-0-of-1").write_text("a file where a directory should be")
    with pytest.raises(RuntimeError, match=r"shard 0 of 1 does not start: (.|\n)*shard-0-of-1"):
        on_ray.start_servers(1, data=tmp_path, insecure=True, timeout=300)
    _wait_for(lambda: not any(entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)))


@pytest.mark.parametrize(
    ("num_shards", "options", "message"),
    [
        (0, {"data": "x"}, "num_shards must be at least 1, got 0"),
        (1, {}, 'durability="wal" needs data'),
        (1, {"durability": "raid"}, "durability must be one of .* got 'raid'"),
        (1, {"data": "x", "placement": "WIDE"}, "placement must be one of .* got 'WIDE'"),
        (1, {"data": "x", "hash_method": "md5"}, "hash_method must be one of .* got 'md5'"),
        (1, {"data": "x", "checkpoint_every": 0}, "checkpoint_every must be positive, got 0"),
    ],
)
def test_arguments_that_are_wrong_are_told_before_anything_starts(
    num_shards: int, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        on_ray.start_servers(num_shards, **options)  # pyright: ignore[reportArgumentType]
