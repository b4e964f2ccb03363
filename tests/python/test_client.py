"""`RecStoreClient`: every verb, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from recstore_ops import (
    DistEmbedding,
    EmbeddingTableConfig,
    KVClient,
    RecStoreClient,
    _native,
    checkpoint,
    get_kv_client,
    table_names,
    table_statistics,
)

pytestmark = pytest.mark.tier("quick")

DIM = 3


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


@pytest.fixture
def client(name: str) -> RecStoreClient:
    """A client with an open table of zeros, stepped by SGD with a rate of 1."""
    client = RecStoreClient()
    config = EmbeddingTableConfig(None, DIM, initializer="zeros", learning_rate=1.0)
    client.init_embedding_table(name, config)
    return client


def longs(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def test_the_client_has_two_names_and_one_instance_of_the_process() -> None:
    assert KVClient is RecStoreClient
    assert get_kv_client() is get_kv_client()


def test_init_embedding_table_opens_a_table_once(client: RecStoreClient, name: str) -> None:
    client.push(name, longs(1), torch.ones(1, DIM))
    same = EmbeddingTableConfig(None, DIM, "sgd", "zeros", learning_rate=0.5)
    assert client.init_embedding_table(name, same) is True
    assert client.pull(name, longs(1)).tolist() == [[1.0] * DIM]
    with pytest.raises(ValueError, match="exists with the configuration"):
        client.init_embedding_table(name, EmbeddingTableConfig(None, DIM, "adam"))


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        (EmbeddingTableConfig(4, DIM), 0.01),
        (EmbeddingTableConfig(4, DIM, learning_rate=0.5), 0.5),
        (EmbeddingTableConfig(4, DIM, "adagrad", learning_rate=0.5), 0.5),
        (EmbeddingTableConfig(4, DIM, {"kind": "adam", "lr": 0.25}, learning_rate=0.5), 0.25),
        (EmbeddingTableConfig(4, DIM, {"kind": "ftrl", "alpha": 0.25}, learning_rate=0.5), 0.25),
        (EmbeddingTableConfig(4, DIM, "ftrl", learning_rate=0.5), 0.5),
    ],
)
def test_an_optimizers_own_rate_comes_before_learning_rate(
    config: EmbeddingTableConfig, rate: float, name: str
) -> None:
    RecStoreClient().init_embedding_table(name, config)
    assert table_statistics(name)["learning_rate"] == rate


def test_push_and_pull_write_and_read(client: RecStoreClient, name: str) -> None:
    ids = longs(5, -5, 5)
    client.push(name, ids, torch.arange(9.0).reshape(3, DIM))
    assert client.pull(name, longs(-5, 5)).tolist() == [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    assert client.pull(name, longs(1, 2, 3, 4).reshape(2, 2)).shape == (2, 2, DIM)
    assert client.stats(name)["rows"] == 2


def test_update_takes_one_step_with_duplicates_summed(client: RecStoreClient, name: str) -> None:
    client.update(name, longs(1, 2, 1), torch.ones(3, DIM))
    assert client.pull(name, longs(1, 2)).tolist() == [[-2.0] * DIM, [-1.0] * DIM]
    statistics = client.stats(name)
    assert (statistics["step"], statistics["updates"]) == (1, 2)


def test_delete_is_harmless_for_unknown_ids(client: RecStoreClient, name: str) -> None:
    client.push(name, longs(1, 2), torch.ones(2, DIM))
    client.delete(name, longs(2, 2, 99))
    client.delete(name, longs(2))
    assert client.pull(name, longs(1, 2)).tolist() == [[1.0] * DIM, [0.0] * DIM]
    assert (client.stats(name)["rows"], client.stats(name)["deletes"]) == (1, 1)


@pytest.mark.parametrize("drop", [RecStoreClient.drop, RecStoreClient.delete_data])
def test_drop_deletes_a_table_and_frees_its_name(
    drop: Callable[[RecStoreClient, str], None], client: RecStoreClient, name: str
) -> None:
    client.push(name, longs(1), torch.ones(1, DIM))
    drop(client, name)
    assert name not in table_names()
    with pytest.raises(KeyError, match="there is no table"):
        client.pull(name, longs(1))
    client.init_embedding_table(name, EmbeddingTableConfig(8, DIM + 1, "adam"))
    assert client.pull(name, longs(1)).shape == (1, DIM + 1)


def test_a_client_follows_a_name_to_the_table_that_took_it_over(client: RecStoreClient, name: str) -> None:
    client.push(name, longs(1), torch.ones(1, DIM))
    other = RecStoreClient()
    other.drop(name)
    other.init_embedding_table(name, EmbeddingTableConfig(8, DIM + 1, initializer="zeros"))
    assert client.pull(name, longs(1)).tolist() == [[0.0] * (DIM + 1)]


def test_a_client_finds_the_tables_of_modules(name: str) -> None:
    module = DistEmbedding(7, DIM, name)
    client = RecStoreClient()
    client.push(name, longs(3), torch.ones(1, DIM))
    assert module(torch.tensor(3)).tolist() == [1.0] * DIM
    assert client.get_data_meta(name) == (torch.float32, (7, DIM))


def test_writes_and_updates_are_carried_out_in_the_order_of_their_issue(client: RecStoreClient, name: str) -> None:
    rows = torch.ones(1, DIM)
    handles = [client.push_async(name, longs(1), rows), client.update_async(name, longs(1), -rows)]
    rows.zero_()
    for handle in handles:
        client.wait(handle)
    assert client.pull(name, longs(1)).tolist() == [[2.0] * DIM]
    refused = client.push_async(name, longs(1), torch.full((1, DIM), torch.nan))
    with pytest.raises(RuntimeError, match="row of id 1 at position 0"):
        client.wait(refused)


def test_what_is_no_tensor_is_refused_when_it_is_issued(client: RecStoreClient, name: str) -> None:
    rows, numbers = torch.ones(1, DIM), cast(Any, [1])
    for call in (client.update_async, client.push_async):
        with pytest.raises(TypeError, match="ids must be a tensor, got list"):
            call(name, numbers, rows)
        with pytest.raises(TypeError, match=r"(grads|data) must be a tensor, got list"):
            call(name, longs(1), cast(Any, [[1.0] * DIM]))
    with pytest.raises(TypeError, match="ids must be a tensor, got list"):
        checkpoint.shard_of(numbers, 2)


def test_set_learning_rate_counts_from_the_next_step(client: RecStoreClient, name: str) -> None:
    client.set_learning_rate(name, 0.25)
    client.update(name, longs(1), torch.ones(1, DIM))
    assert client.pull(name, longs(1)).tolist() == [[-0.25] * DIM]
    statistics = client.stats(name)
    assert (statistics["learning_rate"], statistics["learning_rate_was_set"]) == (0.25, True)


def test_init_data_keeps_its_rows(name: str) -> None:
    client = RecStoreClient()
    ones = lambda shape, dtype: torch.ones(shape, dtype=dtype)  # noqa: E731
    client.init_data(name, (4, DIM), torch.float32, ones)
    client.update(name, longs(1), torch.ones(1, DIM))
    client.init_data(name, (4, DIM), torch.float32, ones)
    assert client.pull(name, longs(0)).tolist() == [[1.0] * DIM]
    assert client.pull(name, longs(1)).lt(1).all()
    assert name in client.gdata_name_list()
    assert client.get_data_meta(name) == (torch.float32, (4, DIM))
    with pytest.raises(TypeError, match="has the shape"):
        client.init_data(name, (5, DIM), torch.float32)


def test_get_data_meta_of_an_open_vocabulary_has_no_bound(client: RecStoreClient, name: str) -> None:
    assert client.get_data_meta(name) == (torch.float32, (None, DIM))


def test_stats_cover_one_table_or_all(client: RecStoreClient, name: str) -> None:
    assert client.stats(name) == table_statistics(name)
    assert client.stats()[name] == client.stats(name)
    assert {name, *client.stats()} <= set(client.data_name_list())


def test_stats_leave_out_a_table_that_is_dropped_meanwhile(
    client: RecStoreClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "table_names", lambda: ["dropped", name])
    assert list(client.stats()) == [name]


def test_a_barrier_alone_returns_at_once(client: RecStoreClient) -> None:
    client.barrier()


VERBS: dict[str, Callable[[RecStoreClient, str], object]] = {
    "pull": lambda client, name: client.pull(name, longs(1)),
    "push": lambda client, name: client.push(name, longs(1), torch.ones(1, DIM)),
    "update": lambda client, name: client.update(name, longs(1), torch.ones(1, DIM)),
    "delete": lambda client, name: client.delete(name, longs(1)),
    "drop": lambda client, name: client.drop(name),
    "set_learning_rate": lambda client, name: client.set_learning_rate(name, 0.5),
    "stats": lambda client, name: client.stats(name),
    "get_data_meta": lambda client, name: client.get_data_meta(name),
}


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_name_is_a_key_error_and_no_new_table(verb: str, name: str) -> None:
    with pytest.raises(KeyError) as caught:
        VERBS[verb](RecStoreClient(), name)
    assert caught.value.args == (f'there is no table "{name}"',)
    assert name not in table_names()


def test_a_refused_push_or_update_changes_nothing(client: RecStoreClient, name: str) -> None:
    client.push(name, longs(1), torch.ones(1, DIM))
    before = client.stats(name)
    for verb in (client.push, client.update):
        for rows in (torch.ones(1, DIM), torch.ones(2, DIM + 1), torch.ones(2, DIM).long()):
            with pytest.raises(RuntimeError):
                verb(name, longs(1, 2), rows)
    assert client.stats(name) == before
    assert client.pull(name, longs(1)).tolist() == [[1.0] * DIM]
