"""How many requests a training step sends to servers, counted by these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from served_tables import ServerProcesses
from torch import Tensor

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    get_kv_client,
    servers,
)
from recstore_ops.servers.metrics_text import fetch

pytestmark = pytest.mark.tier("test")

TABLES = 26
BATCH = 8


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    with ServerProcesses(tmp_path_factory.mktemp("servers"), 2, "--metrics-port", "0") as running:
        servers.set_ps_servers(running.addresses)
        yield running
        servers.set_ps_backend("embedded")


def num_requests(processes: ServerProcesses) -> dict[str, int]:
    """The requests that all servers have answered, by verb."""
    counts: dict[str, int] = {}
    for address in processes.metrics:
        for sample in fetch(address).of("recstore_requests_total"):
            counts[sample.labels["verb"]] = counts.get(sample.labels["verb"], 0) + int(sample.value)
    return counts


def requests_of(processes: ServerProcesses, work: Callable[[], None]) -> dict[str, int]:
    """The requests that some work sends, by verb."""
    before = num_requests(processes)
    work()
    after = num_requests(processes)
    return {verb: count - before.get(verb, 0) for verb, count in after.items() if count != before.get(verb, 0)}


class Training:
    """A model of many tables and its steps, on ids that both servers have rows of."""

    def __init__(self, name: str, **options: Any) -> None:
        keys = [f"{name}_{number}" for number in range(TABLES)]
        tables = [{"name": key, "num_embeddings": None, "embedding_dim": 4, "feature_names": [key]} for key in keys]
        self.model = RecStoreEmbeddingBagCollection(tables, optimizer="adagrad", **options)
        self.optimizer = SparseOptimizer(modules=[self.model])
        lengths = torch.ones(TABLES * BATCH, dtype=torch.int64)
        self.batch = KeyedJaggedTensor(keys, torch.arange(TABLES * BATCH), lengths=lengths)

    def step(self) -> None:
        self.model(self.batch).square().sum().backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"),
    [("kept", {}), ("leaving", {"eviction": {"ttl": 1, "interval": 1}})],
)
def test_a_step_of_many_tables_asks_each_server_for_rows_once_and_sends_it_gradients_once(
    processes: ServerProcesses, name: str, options: dict[str, Any]
) -> None:
    training = Training(name, **options)
    training.step()
    assert requests_of(processes, training.step) == {"read": 2, "update": 2}


def test_a_scheduled_learning_rate_costs_requests_in_the_steps_that_change_it(processes: ServerProcesses) -> None:
    training = Training("scheduled")
    training.step()
    for group in training.optimizer.param_groups:
        group["lr"] /= 2
    assert requests_of(processes, training.step)["update"] == 2
    assert requests_of(processes, training.step) == {"read": 2, "update": 2}
    modules = [module for module in training.model.modules() if isinstance(module, DistEmbeddingBag)]
    assert [module.table.learning_rate(asks=True) for module in modules] == [(0.005, False)] * TABLES


def test_a_rate_that_another_client_set_by_hand_wins_over_a_scheduled_one(processes: ServerProcesses) -> None:
    module = DistEmbedding(None, 2, "shared", optimizer="sgd")
    optimizer = SparseOptimizer(modules=[module])
    # Another client: what it sets the first one is not told.
    servers.set_ps_servers(processes.addresses)
    get_kv_client().set_learning_rate("shared", 0.5)
    optimizer.param_groups[0]["lr"] = 0.25
    module(torch.arange(4)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert module.table.learning_rate(asks=True) == (0.5, True)


def test_rows_that_left_are_not_those_of_a_prefetch(processes: ServerProcesses) -> None:
    eviction = {"ttl": 1, "interval": 1}
    module = DistEmbedding(None, 2, "prefetched", optimizer="sgd", initializer="zeros", eviction=eviction)
    optimizer, client = SparseOptimizer(modules=[module]), get_kv_client()
    ids = torch.arange(16)

    def step(ids: Tensor) -> None:
        module(ids).sum().backward()
        optimizer.step()

    step(ids)
    prefetch = client.prefetch(ids, name="prefetched")
    for _ in range(3):
        step(torch.arange(100, 116))
    assert torch.equal(client.wait_and_get(prefetch, 2), torch.zeros(16, 2))
