"""A table as the hash table it is: from ids to indices, and indices that are used again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recstore_ops import Table, TableConfig, table_statistics
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("quick")

DIM = 2
DOCUMENTED_IDS = [1180210, 721458, 655922, 1000000, 2000000]


@pytest.fixture
def table(table_name: Callable[[], str]) -> Table:
    return Table(table_name(), DIM, TableConfig(block_size=4, optimizer={"kind": "adagrad", "lr": 1.0}))


def longs(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def insert(table: Table, *ids: int) -> list[int]:
    """The indices of ids, which get a row where they have none."""
    return operators.hashtable_lookup(table.handle, longs(*ids), DIM, True)[0].tolist()


def find(table: Table, *ids: int) -> list[int]:
    return operators.hashtable_lookup(table.handle, longs(*ids), DIM, False)[0].tolist()


def delete(table: Table, *ids: int) -> None:
    operators.hashtable_delete(table.handle, longs(*ids))


def listed(table: Table) -> list[int]:
    return operators.hashtable_ids(table.handle).tolist()


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_new_ids_get_rising_indices_and_a_freed_index_is_used_again(table: Table) -> None:
    assert insert(table, *DOCUMENTED_IDS) == [0, 1, 2, 3, 4]

    delete(table, 655922)
    assert insert(table, 328637) == [2]

    assert find(table, *DOCUMENTED_IDS, 328637) == [0, 1, -1, 3, 4, 2]
    assert listed(table) == [1180210, 721458, 328637, 1000000, 2000000]


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_a_lookup_without_insert_gives_no_id_a_row(table: Table) -> None:
    insert(table, 5)
    index, rows = operators.hashtable_lookup(table.handle, longs(4, 5, 6), DIM, False)
    assert index.tolist() == [-1, 0, -1]
    assert torch.equal(rows, operators.emb_read(table.handle, longs(4, 5, 6), DIM))
    assert listed(table) == [5]


def test_a_lookup_with_insert_stores_the_initial_values(table: Table) -> None:
    initial = operators.emb_read(table.handle, longs(4, 5), DIM)
    _, rows = operators.hashtable_lookup(table.handle, longs(4, 5), DIM, True)
    assert torch.equal(rows, initial)
    assert torch.equal(operators.emb_read(table.handle, longs(4, 5), DIM), initial)
    assert listed(table) == [4, 5]


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_a_lookup_keeps_the_shape_of_the_ids(table: Table) -> None:
    ids = torch.arange(6).reshape(2, 3)
    index, rows = operators.hashtable_lookup(table.handle, ids.t(), DIM, True)
    assert index.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert rows.shape == (3, 2, DIM)
    index, rows = operators.hashtable_lookup(table.handle, ids[:0], DIM, True)
    assert (index.shape, rows.shape) == ((0, 3), (0, 3, DIM))


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_duplicates_in_one_lookup_get_one_index(table: Table) -> None:
    assert insert(table, 7, 8, 7, 8, 9) == [0, 1, 0, 1, 2]


def test_both_ends_of_int64_are_ids_like_any_other(table: Table) -> None:
    ends = (-(2**63), 2**63 - 1)
    assert insert(table, *ends) == [0, 1]
    assert operators.hashtable_lookup(table.handle, torch.tensor(2**63, dtype=torch.uint64), DIM, False)[0] == 0
    delete(table, *ends)
    assert find(table, *ends) == [-1, -1]


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_deleting_twice_frees_an_index_once(table: Table) -> None:
    insert(table, 1, 2, 3)
    delete(table, 2, 2)
    delete(table, 2)
    delete(table, 99)
    assert sorted(insert(table, 10, 11)) == [1, 3]
    assert len(set(find(table, 1, 3, 10, 11))) == 4
    assert table.statistics()["deletes"] == 1


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_a_reused_index_keeps_nothing_of_the_row_before(table: Table) -> None:
    insert(table, 1)
    operators.emb_update(table.handle, longs(1), torch.full((1, DIM), 100.0))
    delete(table, 1)
    initial = operators.emb_read(table.handle, longs(2), DIM)
    assert insert(table, 2) == [0]
    assert torch.equal(operators.emb_read(table.handle, longs(2), DIM), initial)

    operators.emb_update(table.handle, longs(2), torch.ones(1, DIM))

    # The first step of AdaGrad is lr * g / sqrt(g^2): the large gradient before is forgotten.
    assert torch.allclose(operators.emb_read(table.handle, longs(2), DIM), initial - 1)


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_ids_come_in_the_order_of_their_indices(table: Table) -> None:
    ids = [int(id) for id in torch.randperm(100)]
    insert(table, *ids)
    assert listed(table) == ids
    assert find(table, *ids) == list(range(100))


def test_the_size_counts_rows(table: Table) -> None:
    assert operators.hashtable_size(table.handle) == 0
    insert(table, 1, 2, 2)
    operators.emb_update(table.handle, longs(2, 3), torch.ones(2, DIM))
    operators.emb_write(table.handle, longs(4, 4), torch.ones(2, DIM))
    assert operators.hashtable_size(table.handle) == len(table) == 4
    delete(table, 1, 50)
    assert operators.hashtable_size(table.handle) == 3


def test_clearing_takes_all_rows_and_their_memory_and_starts_over(table: Table) -> None:
    empty = table.statistics()["bytes"]
    initial = operators.emb_read(table.handle, longs(1), DIM)
    insert(table, *range(100))
    operators.emb_update(table.handle, longs(1), torch.ones(1, DIM))
    operators.set_learning_rate(table.handle, 0.25)

    operators.hashtable_clear(table.handle)

    statistics = table.statistics()
    assert (statistics["rows"], statistics["bytes"], statistics["deletes"]) == (0, empty, 100)
    assert (statistics["step"], statistics["learning_rate"]) == (1, 0.25)
    assert listed(table) == []
    assert torch.equal(operators.emb_read(table.handle, longs(1), DIM), initial)
    assert insert(table, 42) == [0]


def test_rows_outlive_a_handle_until_their_table_is_dropped(table_name: Callable[[], str]) -> None:
    name = table_name()
    first, second = operators.make_hashtable(name, DIM), operators.make_hashtable(name, DIM)
    operators.emb_write(first, longs(1), torch.ones(1, DIM))

    operators.hashtable_release(first)
    assert operators.hashtable_size(second) == 1
    operators.hashtable_release(second)
    with pytest.raises(RuntimeError, match="was released, or comes from another process"):
        operators.hashtable_release(second)
    assert table_statistics(name)["rows"] == 1

    again = operators.make_hashtable(name, DIM)
    assert operators.emb_read(again, longs(1), DIM).tolist() == [[1.0] * DIM]
    operators.drop_table(name)
    fresh = operators.make_hashtable(name, DIM)
    assert operators.hashtable_size(fresh) == 0
    assert len({int(handle[0]) for handle in (first, again, fresh)}) == 3


def test_a_step_counts_each_distinct_id_once(table: Table) -> None:
    operators.emb_update(table.handle, longs(1, 2, 1, 1), torch.ones(4, DIM))
    statistics = table.statistics()
    assert (statistics["step"], statistics["updates"], statistics["inserts"]) == (1, 2, 2)
