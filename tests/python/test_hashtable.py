"""`HashTable`: ids, indices, rows and slots; means of gradients; names; copies; and `torch.compile`."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_kinds import REGISTRY
from torch import Tensor, nn

from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer, Table, TableConfig, _native, embedding
from recstore_ops.autograd import GradWorkerMeanFunction, HashTableLookupFunction
from recstore_ops.nn.hashtable import HashTable, HashTableRegister, count_workers
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("test")

DIM = 2
EXTREME_IDS = [-(2**63), -(2**52) - 7, -2, -1, 0, 2**52, 2**53, 2**63 - 1]
ADAM = {"kind": "adam", "lr": 0.1}
ADAGRAD = {"kind": "adagrad", "lr": 1.0}


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


@pytest.fixture
def table(name: str) -> HashTable:
    return HashTable(DIM, name, block_size=4, optimizer=ADAGRAD, insert_on_lookup=True)


def longs(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def ascending(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def mapped(table: HashTable) -> dict[int, int]:
    """The ids of a table and their indices."""
    ids, index = table.ids_map()
    return dict(zip(ids.tolist(), index.tolist(), strict=True))


def train(table: HashTable, ids: Tensor, grads: Tensor | float = 1.0) -> None:
    (table(ids) * grads).sum().backward()
    SparseOptimizer(modules=[table]).step()


# Ids, indices and rows.


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_new_ids_get_rising_indices_and_a_freed_index_is_used_again(table: HashTable) -> None:
    table.insert(longs(1180210, 721458, 655922, 1000000, 2000000), ascending(5, DIM))
    assert mapped(table) == {1180210: 0, 721458: 1, 655922: 2, 1000000: 3, 2000000: 4}

    table.delete(longs(655922))
    table.insert(longs(328637), ascending(1, DIM))

    assert mapped(table) == {1180210: 0, 721458: 1, 1000000: 3, 2000000: 4, 328637: 2}
    assert table.ids().tolist() == [1180210, 721458, 328637, 1000000, 2000000]


def test_fresh_ids_read_as_zeros_where_the_initializer_says_so(name: str) -> None:
    table = HashTable(128, name, block_size=1024, initializer="zeros", insert_on_lookup=True)
    assert torch.equal(table(torch.arange(3000)), torch.zeros(3000, 128))
    assert len(table) == 3000


def test_inserted_rows_are_found_among_ids_without_a_row(table: HashTable) -> None:
    rows = ascending(3, DIM)
    table.insert(longs(10, 20, 30), rows)
    initial = HashTable.forward(table.eval(), longs(1, 2))
    found = table.train()(longs(30, 1, 10, 2, 20))
    assert torch.equal(found, torch.stack([rows[2], initial[0], rows[0], initial[1], rows[1]]))


def test_every_id_looked_up_gets_a_row_at_the_lookup_where_asked(table: HashTable) -> None:
    table(longs(5, 3, 5))
    table(longs(4, 3))
    assert sorted(table.ids().tolist()) == [3, 4, 5]


def test_ids_get_their_row_with_their_first_update_otherwise(name: str) -> None:
    table = HashTable(DIM, name, initializer="zeros", lr=1.0)
    rows = table(longs(5, 3))
    assert len(table) == 0
    rows[0].sum().backward()
    SparseOptimizer(modules=[table]).step()
    assert sorted(table.ids().tolist()) == [3, 5]
    assert table.slot("embedding", longs(3, 5)).tolist() == [[0, 0], [-1, -1]]


def test_evaluation_never_adds_ids_and_carries_no_gradient(table: HashTable) -> None:
    table.insert(longs(1), ascending(1, DIM))
    rows = table.eval()(longs(7, 1, -7))
    assert not rows.requires_grad
    assert torch.equal(rows[1], ascending(DIM))
    assert table.ids().tolist() == [1]


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_read_only_lookups_of_unknown_ids_never_write(table: HashTable) -> None:
    table.insert(longs(1, 2), ascending(2, DIM))
    handle, collector, anchor = table.table.handle, table.table.collector, table.table.anchor
    arguments = (anchor, longs(8, 2, 9), handle, collector, DIM, False)
    index, rows = HashTableLookupFunction.apply(*arguments)  # type: ignore[misc]
    rows[1].sum().backward()
    assert index.tolist() == [-1, 1, -1]
    assert not index.requires_grad
    assert table.ids().tolist() == [1, 2]

    table.clear_grad()
    SparseOptimizer(modules=[table]).step()
    assert torch.equal(table.embeddings(), ascending(2, DIM))


@pytest.mark.parametrize("threads", [1, 2])
def test_ids_without_a_row_anywhere_in_a_large_batch_read_as_their_initial_values(threads: int, name: str) -> None:
    table = HashTable(64, name, initializer="zeros").eval()
    ids = torch.arange(5000)
    table.insert(ids[::3], torch.ones(len(ids[::3]), 64))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(table(ids), (ids % 3 == 0).float()[:, None].expand(-1, 64))
    finally:
        torch.set_num_threads(before)


def test_clear_leaves_a_table_that_works(table: HashTable) -> None:
    train(table, torch.arange(20))
    table.clear()
    assert len(table) == 0
    assert table.ids_map()[1].shape == (0,)
    assert table.embeddings().shape == (0, DIM)
    initial = table.eval()(longs(3))
    assert torch.equal(table.train()(longs(3)), initial)
    assert mapped(table) == {3: 0}


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_duplicate_ids_in_a_lookup_or_an_insert_leak_no_index(table: HashTable) -> None:
    table(longs(7, 7, 7, 8))
    table.insert(longs(9, 9, 7, 10), ascending(4, DIM))
    assert mapped(table) == {7: 0, 8: 1, 9: 2, 10: 3}
    assert table.slot("embedding", longs(9)).tolist() == [[3, 4]]


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_deleting_an_id_twice_hands_no_row_to_two_ids(table: HashTable) -> None:
    table.insert(longs(1, 2, 3), ascending(3, DIM))
    table.delete(longs(2, 2))
    table.delete(longs(2, 99))
    table.insert(longs(4, 5), torch.tensor([[4.0, 4.0], [5.0, 5.0]]))
    assert mapped(table) == {1: 0, 3: 2, 4: 1, 5: 3}
    assert table.slot("embedding", longs(4, 5)).tolist() == [[4, 4], [5, 5]]


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_ids_and_rows_that_are_not_contiguous_are_read_by_position(table: HashTable) -> None:
    strided = torch.arange(8)[::2]
    table(strided)
    assert table.ids().tolist() == [0, 2, 4, 6]
    table.insert(strided, ascending(DIM, 4).t())
    assert torch.equal(table(strided.reshape(2, 2).t()), ascending(DIM, 4).t().reshape(2, 2, DIM).transpose(0, 1))
    table.accept_grad(strided, ascending(DIM, 4).t())
    assert torch.equal(table.grad()[1], ascending(DIM, 4).t())


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
@pytest.mark.parametrize("ids_shape", [(), (0,), (3,), (2, 3), (2, 0)])
@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (2, 1, 4)])
def test_rows_of_any_shape_come_back_whole(shape: tuple[int, ...], ids_shape: tuple[int, ...], name: str) -> None:
    table = HashTable(shape, name, lr=1.0)
    ids = torch.arange(torch.Size(ids_shape).numel()).reshape(ids_shape)
    rows = ascending(*ids_shape, *shape)
    table.insert(ids, rows)
    assert torch.equal(table(ids), rows)
    assert torch.equal(table.embeddings(), rows.reshape(-1, *shape))

    (table(ids) * rows).sum().backward()
    assert torch.equal(table.grad()[1], rows.reshape(-1, *shape))
    SparseOptimizer(modules=[table]).step()
    assert torch.equal(table.eval()(ids), torch.zeros_like(rows))


def test_an_int_stands_for_a_shape_of_one_size(name: str) -> None:
    table = HashTable(5, name)
    assert table.embedding_shape == (5,)
    assert table(longs(1, 2)).shape == (2, 5)


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_every_int64_is_an_id(table: HashTable) -> None:
    ids, rows = longs(*EXTREME_IDS), ascending(len(EXTREME_IDS), DIM)
    table.insert(ids, rows)
    train(table, ids)
    assert table.ids().tolist() == EXTREME_IDS
    assert torch.equal(table.embeddings(), rows - 1)


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_uint64_and_int32_ids_are_taken_as_int64(table: HashTable) -> None:
    table(torch.tensor([2**64 - 1, 5, 5], dtype=torch.uint64)).sum().backward()
    table(torch.tensor([-1, 6], dtype=torch.int32)).sum().backward()
    assert mapped(table) == {-1: 0, 5: 1, 6: 2}
    assert table.grad()[0].tolist() == [-1, 5, 6]
    assert table.slot("embedding", torch.tensor([2**64 - 1], dtype=torch.uint64)).shape == (1, DIM)


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_growing_over_many_blocks_moves_no_row(name: str) -> None:
    table = HashTable(3, name, block_size=5)
    rows = torch.randn(101, 3)
    for part in torch.arange(101).split(7):
        table.insert(part, rows[part])
    assert torch.equal(table.embeddings(), rows)
    assert table.ids_map()[1].tolist() == list(range(101))


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_the_indices_of_many_ids_are_all_listed(name: str) -> None:
    table = HashTable(1, name)
    ids = torch.randperm(140_000)
    table.insert(ids, ids.float()[:, None])
    found, index = table.ids_map()
    assert torch.equal(found, ids)
    assert torch.equal(index, torch.arange(140_000))


# Initial values.


def test_row_values_do_not_depend_on_the_order_of_insertion(table_name: Callable[[], str]) -> None:
    name, ids = table_name(), torch.randperm(500)
    found = []
    for order in (ids, ids.flip(0)):
        table = HashTable(8, name, insert_on_lookup=True)
        for part in order.split(33):
            table(part)
        found.append(table.slot("embedding", ids))
        del table
        RecStoreClient().drop(name)
    assert torch.equal(*found)


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_row_values_do_not_depend_on_the_threads_that_insert(table_name: Callable[[], str]) -> None:
    name, ids = table_name(), torch.arange(400)
    alone = HashTable(8, name)
    initial = alone.eval()(ids)
    del alone
    table = HashTable(8, name, insert_on_lookup=True)
    threads = [threading.Thread(target=table, args=(part,)) for part in ids.split(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(table.slot("embedding", ids), initial)
    assert sorted(mapped(table).values()) == list(range(400))


def test_initial_values_do_not_depend_on_the_block_size(table_name: Callable[[], str]) -> None:
    name, found = table_name(), []
    for block_size in (4, 1000):
        table = HashTable(6, name, block_size=block_size, insert_on_lookup=True)
        found.append(table(torch.arange(50)).detach())
        del table
        RecStoreClient().drop(name)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["uniform", "normal", "truncated_normal"])
def test_two_ids_start_with_different_rows(kind: str, name: str) -> None:
    rows = HashTable([4, 4], name, initializer=kind)(longs(1, 2))
    assert not torch.equal(rows[0], rows[1])


def test_an_id_deleted_and_inserted_again_starts_from_its_initial_value(table: HashTable) -> None:
    initial = table.eval()(longs(1, 2))
    table.train()
    train(table, longs(1, 2))
    assert table.slot("state_sum", longs(1)).ne(0).all()

    table.delete(longs(1))
    table(longs(3))  # Takes over the index of 1, and must not see its state.
    table(longs(1))

    assert torch.equal(table.slot("embedding", longs(1)), initial[:1])
    assert table.slot("state_sum", longs(1, 3)).eq(0).all()
    assert table.slot("state_sum", longs(2)).ne(0).all()


# Slots.

SLOTS = {
    kind: [(slot["name"], slot["width"]) for slot in rule["slots"] if slot["with"] is None]
    for kind, rule in REGISTRY.items()
}


@pytest.mark.parametrize(("kind", "slots"), SLOTS.items())
def test_slots_are_listed_by_name(kind: str, slots: list[tuple[str, int | None]], name: str) -> None:
    table = HashTable([2, 3], name, optimizer=kind)
    assert table.slot_names() == ["embedding", *(slot for slot, _ in slots)]
    for slot, width in slots:
        values = table.slot(slot, torch.zeros(4, 1, dtype=torch.int64))
        assert values.shape == ((4, 1, 2, 3) if width is None else (4, 1, width))
        assert values.eq(0).all()


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
def test_a_slot_shows_what_the_optimizer_keeps_for_each_id(name: str) -> None:
    table = HashTable(DIM, name, optimizer=ADAGRAD)
    train(table, longs(4, 9, 4), torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 1.0]]))
    assert table.ids().tolist() == [4, 9]
    assert table.slot("state_sum").tolist() == [[4, 9], [9, 16]]
    assert table.slot("state_sum", longs(9, 5, 4)).tolist() == [[9, 16], [0, 0], [4, 9]]
    assert torch.equal(table.slot("embedding"), table.embeddings())


def test_a_slot_of_one_value_a_row_has_a_size_of_one(name: str) -> None:
    table = HashTable(DIM, name, optimizer={"kind": "rowwise_adagrad", "lr": 1.0})
    train(table, longs(4), torch.tensor([[3.0, 4.0]]))
    assert table.slot("state_sum").tolist() == [[25]]


def test_an_unknown_slot_is_refused_with_the_names_there_are(table: HashTable) -> None:
    with pytest.raises(ValueError, match=r"has the slots \['embedding', 'state_sum'\], got 'exp_avg'"):
        table.slot("exp_avg")
    with pytest.raises(RuntimeError, match=r'hashtable_slot: table ".*" has the slots \["state_sum"\], got "exp_avg"'):
        operators.hashtable_slot(table.table.handle, longs(1), "exp_avg")


def test_the_slot_operator_checks_the_bound_of_the_ids(name: str) -> None:
    table = Table(name, DIM, TableConfig(num_embeddings=5, optimizer=ADAGRAD))
    assert operators.hashtable_slot(table.handle, longs(4)[None], "state_sum").shape == (1, 1, DIM)
    assert operators.hashtable_slot(table.handle, longs(), "state_sum").shape == (0, DIM)
    with pytest.raises(IndexError, match="id 5 at position 1"):
        operators.hashtable_slot(table.handle, longs(4, 5), "state_sum")


def test_slots_of_a_table_that_does_not_exist_are_none(name: str) -> None:
    assert _native.table_slots(name) is None


# Gradients.


def test_grad_gives_the_rows_of_duplicates_over_several_backwards(table: HashTable) -> None:
    table.accept_grad(longs(5, 7), torch.tensor([[1.0, 1.0], [10.0, 10.0]]))
    table.accept_grad(longs(5), torch.tensor([[100.0, 100.0]]))
    ids, grads = table.grad()
    assert ids.tolist() == [5, 7]
    assert grads.tolist() == [[101, 101], [10, 10]]


def test_three_accepted_gradients_are_summed_undivided(name: str) -> None:
    table = HashTable(1, name)
    for ids, grads in [([1, 2], [1.0, 2.0]), ([2, 1], [3.0, 6.0]), ([3, 2], [1.0, 5.0])]:
        table.accept_grad(longs(*ids), torch.tensor(grads)[:, None])
    ids, grads = table.grad()
    assert dict(zip(ids.tolist(), grads.flatten().tolist(), strict=True)) == {1: 7, 2: 10, 3: 1}


def test_accepted_gradients_are_applied_by_the_optimizer_or_forgotten(name: str) -> None:
    table = HashTable([1, 2], name, initializer="zeros", lr=0.5)
    table.accept_grad(longs(3), torch.ones(1, 1, 2))
    table.clear_grad()
    assert [part.shape for part in table.grad()] == [(0,), (0, 1, 2)]
    table.accept_grad(longs(4), torch.ones(1, 1, 2))
    SparseOptimizer(modules=[table]).step()
    assert table.ids().tolist() == [4]
    assert table.embeddings().tolist() == [[[-0.5, -0.5]]]
    assert len(table.grad()[0]) == 0


def test_rows_are_gathered_by_the_place_of_each_id() -> None:
    rows = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], requires_grad=True)
    output = GradWorkerMeanFunction.apply(rows, longs(0, 1, 2, 1, 0), "worker", 1)
    assert torch.equal(output, rows[longs(0, 1, 2, 1, 0)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grad_reduce_by", "num_workers", "expected"),
    [
        ("worker", 1, [[12.0], [2.0], [0.0]]),
        ("worker", 4, [[3.0], [0.5], [0.0]]),
        ("id", 4, [[4.0], [2.0], [0.0]]),
    ],
)
def test_a_row_gets_the_mean_of_its_gradients(grad_reduce_by: str, num_workers: int, expected: list[Any]) -> None:
    rows = torch.zeros(3, 1, requires_grad=True)
    output = GradWorkerMeanFunction.apply(rows, longs(0, 1, 0, 0), grad_reduce_by, num_workers)
    (output * torch.tensor([[1.0], [2.0], [4.0], [7.0]])).sum().backward()  # type: ignore[operator]
    assert rows.grad is not None
    assert rows.grad.tolist() == expected


def test_equal_ids_of_a_call_are_summed_by_worker_and_averaged_by_id(table_name: Callable[[], str]) -> None:
    weights = torch.tensor([[1.0, 2.0], [10.0, 20.0], [3.0, 6.0]])
    for grad_reduce_by, expected in (("worker", [[4, 8], [10, 20]]), ("id", [[2, 4], [10, 20]])):
        table = HashTable(DIM, table_name(), grad_reduce_by=grad_reduce_by)  # type: ignore[arg-type]
        (table(longs(6, 8, 6)) * weights).sum().backward()
        ids, grads = table.grad()
        assert ids.tolist() == [6, 8]
        assert grads.tolist() == expected


def test_gradients_are_divided_by_the_number_of_workers(name: str) -> None:
    table = HashTable(DIM, name, num_workers=4)
    table(longs(6, 6)).sum().backward()
    assert table.grad()[1].tolist() == [[0.5, 0.5]]


def test_the_workers_are_the_processes_of_the_group(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert count_workers() == 1
    assert HashTable(DIM, name).num_workers == 1
    group: Any = object()
    sizes = {None: 8, group: 4}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", sizes.__getitem__)
    assert (count_workers(), count_workers(group)) == (8, 4)


@pytest.mark.embedded_only("the processes of a job share the tables of servers")
def test_a_job_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    with pytest.raises(RuntimeError, match="copies would drift apart"):
        HashTable(DIM, name)
    assert name not in HashTableRegister().names()


def test_a_hash_table_trains_to_the_bit_as_the_functional_lookup(table_name: Callable[[], str]) -> None:
    ids, weights = torch.randint(-20, 20, (6, 50)), torch.randn(6, 50, 4)
    zeros: dict[str, Any] = {"initializer": {"kind": "zeros"}, "optimizer": ADAM}
    table, plain = HashTable(4, table_name(), **zeros), Table(table_name(), 4, TableConfig(**zeros))
    for step in range(6):
        train(table, ids[step], weights[step])
        (embedding(ids[step], plain) * weights[step]).sum().backward()
        SparseOptimizer(modules=[plain]).step()
    assert torch.equal(table(ids), embedding(ids, plain))


def test_several_backwards_before_a_step_are_one_step(name: str) -> None:
    table = HashTable(1, name, initializer="zeros", optimizer=ADAGRAD)
    for scale in (1.0, 2.0):
        (table(longs(7, 7)) * scale).sum().backward()
    SparseOptimizer(modules=[table]).step()
    assert table.slot("state_sum").tolist() == [[36]]
    assert table.embeddings().tolist() == [[-1]]


def test_a_gradient_that_is_not_finite_changes_nothing(table: HashTable) -> None:
    table.insert(longs(1, 2), ascending(2, DIM))
    table.accept_grad(longs(1, 2), torch.tensor([[1.0, 1.0], [1.0, float("nan")]]))
    with pytest.raises(RuntimeError, match="id 2"):
        SparseOptimizer(modules=[table]).step()
    assert torch.equal(table.embeddings(), ascending(2, DIM))


# Optimizers.


@pytest.mark.parametrize("rows", [3, 4, 11], ids=["part of a block", "one block", "several blocks"])
def test_adamw_follows_torch_over_a_dense_twin(rows: int, name: str) -> None:
    options = {"lr": 0.1, "weight_decay": 0.03, "betas": (0.8, 0.95), "eps": 1e-6}
    table = HashTable([2, 3], name, block_size=4, optimizer={"kind": "adamw", **options})
    ids = torch.randperm(1000)[:rows]
    dense = nn.Parameter(table.eval()(ids).clone())
    untouched = table(longs(5000))
    table.train().insert(longs(5000), untouched)
    ours, theirs = SparseOptimizer(modules=[table]), torch.optim.AdamW([dense], **options)
    for _ in range(5):
        weights = torch.randn(rows, 2, 3)
        (table(ids) * weights).sum().backward()
        (dense * weights).sum().backward()
        ours.step()
        theirs.step()
        theirs.zero_grad()
    torch.testing.assert_close(table.eval()(ids), dense.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(table.slot("exp_avg_sq", ids), theirs.state[dense]["exp_avg_sq"], rtol=1e-5, atol=1e-7)
    assert torch.equal(table(longs(5000)), untouched)
    assert table.table.statistics()["step"] == 5


def test_an_optimizer_made_after_a_lookup_works(table: HashTable) -> None:
    table(torch.arange(9)).sum().backward()
    SparseOptimizer(modules=[table]).step()
    table(torch.arange(30)).sum().backward()
    SparseOptimizer(modules=[table]).step()
    assert table.slot("state_sum", longs(8, 29)).tolist() == [[2, 2], [1, 1]]


def test_two_tables_in_one_optimizer_keep_separate_state(table_name: Callable[[], str]) -> None:
    first, second = (HashTable(DIM, table_name(), optimizer=ADAM) for _ in range(2))
    optimizer = SparseOptimizer(modules=[first, second])
    for _ in range(3):
        first(longs(1)).sum().backward()
        optimizer.step()
    (second(longs(1)) * 2).sum().backward()
    optimizer.step()
    assert first.table.statistics()["step"] == 3
    assert second.table.statistics()["step"] == 1
    assert first.slot("exp_avg").tolist() == [[pytest.approx(0.271), pytest.approx(0.271)]]
    assert second.slot("exp_avg").tolist() == [[pytest.approx(0.2), pytest.approx(0.2)]]


def test_a_learning_rate_scheduler_drives_the_table(name: str) -> None:
    table = HashTable(1, name, initializer="zeros", optimizer={"kind": "sgd", "lr": 1.0})
    optimizer = SparseOptimizer(modules=[table])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        table(longs(1)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert table.embeddings().tolist() == [[-1.75]]


# Names.


def test_there_is_one_register() -> None:
    assert HashTableRegister() is HashTableRegister()


def test_a_second_live_table_of_one_name_is_refused_with_both_shown(table_name: Callable[[], str]) -> None:
    name = table_name()
    first = HashTable([2, 3], name)
    with pytest.raises(ValueError, match=rf'"{name}" exists, HashTable\(\(2, 3\), .*requested, HashTable\(\(4,\), '):
        HashTable(4, name)
    with pytest.raises(ValueError, match="exists"):
        HashTable([2, 3], name)
    assert name in HashTableRegister().names()
    assert first(longs(1)).shape == (1, 2, 3)


def test_a_name_is_free_again_when_the_table_is_gone(name: str) -> None:
    table = HashTable(DIM, name)
    table.insert(longs(1), ascending(1, DIM))
    del table
    assert name not in HashTableRegister().names()
    again = HashTable(DIM, name)
    assert torch.equal(again.embeddings(), ascending(1, DIM))


def test_a_table_that_is_garbage_in_a_cycle_does_not_keep_its_name(name: str) -> None:
    gc.disable()
    try:
        table: Any = HashTable(DIM, name)
        table._itself = [table]
        del table
        assert HashTable(DIM, name).name == name
    finally:
        gc.enable()


def test_a_table_that_could_not_be_opened_leaves_its_name_free(name: str) -> None:
    with pytest.raises(ValueError, match="momentum") as raised:
        HashTable(DIM, name, optimizer="momentum")
    assert HashTable(DIM, name).name == name
    assert raised.value is not None


def test_a_name_is_free_for_other_modules(name: str) -> None:
    table = HashTable(DIM, name)
    table.insert(longs(4), ascending(1, DIM))
    assert torch.equal(DistEmbedding(None, DIM, name)(longs(4)), ascending(1, DIM))


def test_a_table_opened_with_another_learning_rate_says_that_it_keeps_its_own(name: str) -> None:
    DistEmbedding(None, DIM, name, lr=0.5)
    with pytest.warns(UserWarning, match=r"keeps lr=0\.5, not 0\.25"):
        HashTable(DIM, name, lr=0.25)


# Copies.


@pytest.fixture(params=["copy", "pickle"])
def copied(request: pytest.FixtureRequest) -> Callable[[HashTable], HashTable]:
    return copy.copy if request.param == "copy" else lambda table: pickle.loads(pickle.dumps(table))


def test_a_loaded_pickle_is_the_same_table_with_gradients_of_its_own(table: HashTable) -> None:
    table.insert(longs(1), ascending(1, DIM))
    table.accept_grad(longs(1), torch.ones(1, DIM))
    other = pickle.loads(pickle.dumps(table))
    assert repr(other) == repr(table)
    assert (len(table.grad()[0]), len(other.grad()[0])) == (1, 0)
    train(other, longs(1))
    assert torch.equal(table.embeddings(), ascending(1, DIM) - 1)


def test_a_name_is_taken_until_the_last_copy_is_gone(copied: Callable[[HashTable], HashTable], name: str) -> None:
    table = HashTable(DIM, name)
    other = copied(table)
    del table
    with pytest.raises(ValueError, match="exists"):
        HashTable(DIM, name)
    del other
    assert HashTable(DIM, name).name == name


def test_a_loaded_table_takes_its_name(name: str) -> None:
    saved = pickle.dumps(HashTable(DIM, name))
    assert name not in HashTableRegister().names()
    loaded = pickle.loads(saved)
    with pytest.raises(ValueError, match="exists"):
        HashTable(DIM, name)
    assert loaded.name == name


# Refusals.


@pytest.mark.parametrize("shape", [0, -1, [3, 0], [2.5], "ab", [True, -2]])
def test_a_shape_that_is_not_of_positive_ints_is_refused(shape: Any, name: str) -> None:
    with pytest.raises(ValueError, match="embedding_shape must be one or more positive ints"):
        HashTable(shape, name)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float64, torch.int64])
def test_a_row_type_that_is_not_supported_is_refused(dtype: torch.dtype, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{str(dtype)[6:]}`, expected one of `float32`, `bfloat16`, `float16`"):
        HashTable(DIM, name, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_reduce_by": "mean"}, 'must be "worker" or "id", got \'mean\''),
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        ({"block_size": 0}, "block_size"),
        ({"initializer": "ones"}, "ones"),
        ({"initializer": "xavier_uniform"}, "num_embeddings"),
        ({"nan_policy": "warn"}, "warn"),
    ],
)
def test_an_invalid_option_is_refused(options: dict[str, Any], message: str, name: str) -> None:
    with pytest.raises(ValueError, match=message):
        HashTable(DIM, name, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.bool])
def test_ids_that_are_no_integers_are_refused(dtype: torch.dtype, table: HashTable) -> None:
    ids = torch.ones(2, dtype=dtype)
    calls: list[Callable[[], object]] = [
        lambda: table(ids),
        lambda: table.insert(ids, torch.ones(2, DIM)),
        lambda: table.delete(ids),
        lambda: table.accept_grad(ids, torch.ones(2, DIM)),
        lambda: table.slot("state_sum", ids),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="ids must be int64, uint64, int32, int16, int8 or uint8"):
            call()
    assert len(table) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_and_gradients_of_other_floating_types_are_converted(dtype: torch.dtype, table: HashTable) -> None:
    table.insert(longs(1), torch.tensor([[0.5, 2.0]], dtype=dtype))
    table.accept_grad(longs(1), torch.tensor([[0.25, 4.0]], dtype=dtype))
    assert table.embeddings().tolist() == [[0.5, 2.0]]
    assert table.grad()[1].tolist() == [[0.25, 4.0]]


def test_rows_and_gradients_of_another_shape_or_type_are_refused(name: str) -> None:
    table = HashTable([2, 3], name)
    with pytest.raises(ValueError, match=r'insert: table ".*" takes embeddings of shape \(1, 2, 3\) for ids'):
        table.insert(longs(1), torch.ones(1, 6))
    with pytest.raises(ValueError, match=r"takes gradients of shape \(2, 2, 3\) for ids of shape \(2,\), got \(1, 2"):
        table.accept_grad(longs(1, 2), torch.ones(1, 2, 3))
    with pytest.raises(TypeError, match=r"takes floating-point embeddings, got torch\.int64"):
        table.insert(longs(1), torch.ones(1, 2, 3, dtype=torch.int64))
    assert len(table) == 0


def test_an_id_out_of_a_bounded_table_is_refused(name: str) -> None:
    table = HashTable(DIM, name, num_embeddings=5, insert_on_lookup=True)
    calls: list[Callable[[Tensor], object]] = [
        table,
        lambda ids: table.insert(ids, torch.ones(2, DIM)),
        lambda ids: table.slot("embedding", ids),
    ]
    for call in calls:
        with pytest.raises(IndexError, match=f'table "{name}"') as raised:
            call(longs(4, 5))
        assert "5" in str(raised.value)
    assert len(table) == 0


# Compiled.

BACKENDS = ["aot_eager", "inductor"]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("insert_on_lookup", [False, True])
@pytest.mark.parametrize("grad_reduce_by", ["worker", "id"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_compiled_whole_trains_to_the_bit_as_eager(
    backend: str, grad_reduce_by: Literal["worker", "id"], insert_on_lookup: bool, table_name: Callable[[], str]
) -> None:
    tables = [
        HashTable(
            [2, 3],
            table_name(),
            initializer="zeros",
            optimizer=ADAM,
            insert_on_lookup=insert_on_lookup,
            grad_reduce_by=grad_reduce_by,
        )
        for _ in range(2)
    ]
    compiled = torch.compile(tables[1], backend=backend, fullgraph=True)
    ids, weights = torch.randint(-9, 9, (4, 5, 6)), torch.randn(4, 5, 6, 2, 3)
    for table, forward in zip(tables, (tables[0], compiled), strict=True):
        optimizer = SparseOptimizer(modules=[table])
        for step in range(4):
            (forward(ids[step]) * weights[step]).sum().backward()
            optimizer.step()
    eager, ours = tables
    assert mapped(ours) == mapped(eager)
    for slot in eager.slot_names():
        assert torch.equal(ours.slot(slot), eager.slot(slot))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.tier("all")
def test_a_compiled_table_takes_batches_of_any_shape(name: str) -> None:
    table = HashTable([3], name)
    compiled = torch.compile(table, fullgraph=True, dynamic=True)
    for shape in [(3,), (5,), (2, 4), (0,), ()]:
        ids = torch.randint(-9, 9, shape)
        rows = compiled(ids)
        rows.sum().backward()
        assert torch.equal(rows, table(ids))
    table.eval()
    assert not compiled(longs(1, 2)).requires_grad


# Anything, in any order.

KEYS = st.integers(-4, 4)
CALLS = st.tuples(
    st.sampled_from(["insert", "delete", "lookup", "read", "clear"]), st.lists(KEYS, max_size=6), st.integers(0, 9)
)


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(CALLS, max_size=25))
def test_a_table_is_a_map_from_ids_to_rows_whose_indices_are_dense(calls: list[tuple[str, list[int], int]]) -> None:
    table = HashTable(1, "a map", block_size=2, insert_on_lookup=True)
    table.clear()
    initial = table.eval()(torch.arange(-4, 5)).flatten().tolist()
    model: dict[int, float] = {}
    most = 0
    for call, keys, value in calls:
        ids = longs(*keys)
        if call == "insert":
            table.insert(ids, (torch.arange(len(keys)) + value).float()[:, None])
            model |= {key: float(value + place) for place, key in enumerate(keys)}
        elif call == "delete":
            table.delete(ids)
            model = {key: row for key, row in model.items() if key not in keys}
        elif call == "clear":
            table.clear()
            model, most = {}, 0
        else:
            rows = table.train(call == "lookup")(ids).flatten().tolist()
            assert rows == [model.get(key, initial[key + 4]) for key in keys]
            model |= {key: initial[key + 4] for key in keys if call == "lookup" and key not in model}
        most = max(most, len(model))
        indices = mapped(table)
        assert indices.keys() == model.keys()
        assert len(set(indices.values())) == len(indices)
        assert all(index < most for index in indices.values())
        assert table.slot("embedding", longs(*model)).flatten().tolist() == list(model.values())
