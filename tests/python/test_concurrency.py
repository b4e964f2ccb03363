"""Threads that read, update, open and drop at once: totals are exact, calls are whole, nothing crashes."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from recstore_ops import (
    DistEmbedding,
    DistTensor,
    RecStoreClient,
    SparseOptimizer,
    Table,
    TableConfig,
    _native,
    embedding,
    table_names,
    table_statistics,
)
from recstore_ops.ops import operators

pytestmark = [pytest.mark.tier("test"), pytest.mark.timeout(120)]

THREADS = 4
TIMEOUT = 60
"""Seconds that the threads of a test may take."""


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    """Lets Python switch threads often, so that a race shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def at_once(*works: Callable[[], object]) -> list[BaseException]:
    """Runs each work on a thread of its own, all starting together, and returns what they raised."""
    barrier, failures = threading.Barrier(len(works)), list[BaseException]()

    def run(work: Callable[[], object]) -> None:
        barrier.wait(TIMEOUT)
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)
    return failures


def counting_config(kind: str = "sgd") -> TableConfig:
    """Rows start at 0 and a gradient of -1 adds 1: exact in float32 up to 2^24."""
    return TableConfig(initializer={"kind": "zeros"}, optimizer={"kind": kind, "lr": 1.0}, block_size=64)


def test_updates_of_many_threads_add_up_exactly(table_name: Callable[[], str]) -> None:
    name, updates = table_name(), 200
    table = Table(name, 2, counting_config())
    # Large enough to be shared over the store's threads, with every id twice.
    ids = torch.arange(3000).repeat(2)

    def update() -> None:
        own = Table(name, 2, counting_config())
        for _ in range(updates):
            operators.emb_update(own.handle, ids[torch.randperm(6000)], -torch.ones(6000, 2))

    assert at_once(*[update] * THREADS) == []

    expected = 2.0 * THREADS * updates
    assert operators.emb_read(table.handle, ids, 2).eq(expected).all()
    statistics = table.statistics()
    assert (statistics["step"], statistics["rows"]) == (THREADS * updates, 3000)
    assert statistics["updates"] == THREADS * updates * 3000


def test_a_reader_sees_every_update_and_write_whole(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 8, counting_config())
    ids, done, torn = torch.arange(2500), threading.Event(), []

    def change() -> None:
        try:
            for count in range(400):
                operators.emb_update(table.handle, ids, -torch.ones(2500, 8))
                if count % 10 == 0:
                    operators.emb_write(table.handle, ids, torch.full((2500, 8), 1000.0 * count))
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            rows = operators.emb_read(table.handle, ids, 8)
            if not rows.eq(rows[0, 0]).all():
                torn.append(rows)

    assert at_once(change, read, read) == []
    assert torn == []


def test_a_step_takes_every_gradient_once_while_others_collect(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, 1, table_name(), lr=1.0, initializer="zeros")
    ids, passes, finished = torch.arange(50), 200, threading.Semaphore(0)

    def collect() -> None:
        for _ in range(passes):
            (-module(ids)).sum().backward()
        finished.release()

    def step() -> None:
        optimizer = SparseOptimizer(modules=[module])
        for _ in range(THREADS):
            while not finished.acquire(timeout=0.001):
                optimizer.step()

    assert at_once(step, *[collect] * THREADS) == []
    SparseOptimizer(modules=[module]).step()

    assert module.weight[ids].eq(THREADS * passes).all()
    assert module._trace == []


def test_inserts_and_deletes_of_many_threads_never_share_an_index(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 1, counting_config("adagrad"))

    def churn(first: int) -> None:
        ids = torch.arange(first, first + 200)
        for _ in range(100):
            operators.hashtable_lookup(table.handle, ids, 1, True)
            operators.emb_write(table.handle, ids, ids[:, None].float())
            assert operators.emb_read(table.handle, ids, 1).flatten().equal(ids.float())
            operators.hashtable_delete(table.handle, ids[::2])

    assert at_once(*(partial(churn, number * 1000) for number in range(THREADS))) == []

    ids = operators.hashtable_ids(table.handle)
    assert sorted(ids.tolist()) == [n * 1000 + odd for n in range(THREADS) for odd in range(1, 200, 2)]
    index, rows = operators.hashtable_lookup(table.handle, ids, 1, False)
    assert index.unique().numel() == len(table) == 100 * THREADS
    assert rows.flatten().equal(ids.float())


def test_of_threads_that_open_one_name_exactly_one_creates_the_table(table_name: Callable[[], str]) -> None:
    for _ in range(30):
        name, tables = table_name(), list[Table]()

        def open_table(name: str = name, tables: list[Table] = tables) -> None:
            tables.append(Table(name, 2))

        assert at_once(*[open_table] * THREADS) == []
        assert len({table.table_id for table in tables}) == 1
        assert [table.is_new for table in tables].count(True) == 1


def test_init_func_fills_a_table_once_however_many_threads_open_it(table_name: Callable[[], str]) -> None:
    calls = list[str]()

    def open_and_train(name: str) -> None:
        def init(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
            calls.append(name)
            return torch.ones(shape)

        module = DistEmbedding(4, 2, name, init, lr=1.0, on_existing="share")
        module(torch.tensor([1])).sum().backward()
        SparseOptimizer(modules=[module]).step()

    for _ in range(30):
        name = table_name()
        assert at_once(*[partial(open_and_train, name)] * THREADS) == []
        assert calls.count(name) == 1
        assert RecStoreClient().pull(name, torch.tensor([1])).tolist() == [[1.0 - THREADS] * 2]


def test_tables_that_are_opened_used_and_dropped_at_once_fail_only_as_documented(
    table_name: Callable[[], str],
) -> None:
    name, ids, refused = table_name(), torch.arange(20), list[str]()

    def tolerate(call: Callable[[], object]) -> None:
        try:
            call()
        except (RuntimeError, KeyError) as error:
            refused.append(str(error))

    def use() -> None:
        def once() -> None:
            table = Table(name, 2)
            embedding(ids, table).sum().backward()
            SparseOptimizer(modules=[table]).step()
            operators.hashtable_delete(table.handle, ids)
            table.statistics()

        for _ in range(150):
            tolerate(once)

    def drop() -> None:
        for _ in range(300):
            tolerate(lambda: RecStoreClient().drop(name))

    def pull() -> None:
        client = RecStoreClient()
        for _ in range(300):
            tolerate(lambda: client.pull(name, ids))
            tolerate(lambda: table_statistics(name))

    assert at_once(use, use, drop, pull) == []
    unexpected = {
        message
        for message in refused
        if f'table "{name}" was dropped' not in message and f'there is no table "{name}"' not in message
    }
    assert unexpected == set()


def test_opening_a_table_that_is_dropped_meanwhile_does_not_bring_it_back(
    table_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(table_name(), 2)
    describe = _native.describe_table

    def describe_then_drop(name: str) -> tuple[int, str] | None:
        description = describe(name)
        operators.drop_table(name)
        return description

    monkeypatch.setattr(_native, "describe_table", describe_then_drop)
    with pytest.raises(KeyError, match="there is no table"):
        Table.open(table.name)
    assert table.name not in table_names()


def test_owners_that_come_and_go_on_many_threads_leave_nothing_behind(
    table_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, failures = table_name(), list[object]()
    monkeypatch.setattr(sys, "unraisablehook", failures.append)

    def own() -> None:
        for _ in range(200):
            DistTensor((3, 2), torch.float32, name)

    assert at_once(*[own] * THREADS) == []
    gc.collect()
    assert failures == []
    assert name not in table_names()


def test_handles_are_never_given_out_twice(table_name: Callable[[], str]) -> None:
    handles = list[int]()

    def open_and_release() -> None:
        for _ in range(200):
            handle = operators.make_hashtable(table_name(), 1)
            handles.append(int(handle[0]))
            operators.hashtable_release(handle)

    assert at_once(*[open_and_release] * THREADS) == []
    assert len(set(handles)) == len(handles) == 200 * THREADS
