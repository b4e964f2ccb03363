"""Reads ahead: consumed once, changed by what this process changes meanwhile, and never a change themselves."""

import gc
import os
from collections.abc import Callable

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from own_draws import fresh_name
from torch import Tensor

import recstore_ops
from recstore_ops import Table, TableConfig
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("test")

ops = torch.ops.recstore
DIM = 3
IDS = torch.tensor([4, -2, 4, 2**62])


@pytest.fixture
def table(table_name: Callable[[], str]) -> Table:
    return Table(table_name(), DIM, TableConfig(optimizer={"kind": "sgd", "lr": 0.5}))


def read(table: Table, ids: Tensor) -> Tensor:
    return ops.emb_read(table.handle, ids, table.dim)


def test_a_prefetch_gives_rows_in_the_order_of_the_ids_and_stores_none(table: Table) -> None:
    handle = ops.emb_prefetch(table.handle, IDS)
    rows = ops.emb_wait_result(handle, DIM)
    assert torch.equal(rows, read(table, IDS))
    assert len(table) == 0


def test_a_prefetch_is_consumed_once(table: Table) -> None:
    handle = ops.emb_prefetch(table.handle, IDS)
    ops.emb_wait_result(handle, DIM)
    for unknown in (handle, 10**9, 0, -1):
        for wait in (lambda handle: ops.emb_wait_result(handle, DIM), ops.emb_wait_tables):
            with pytest.raises(RuntimeError, match=f"prefetch handle {unknown} is unknown, consumed or dropped"):
                wait(unknown)


def test_a_wrong_dim_is_refused_and_does_not_consume(table: Table) -> None:
    handle = ops.emb_prefetch(table.handle, IDS)
    with pytest.raises(RuntimeError, match=r"has rows of dims \[3\], got dim 4"):
        ops.emb_wait_result(handle, 4)
    assert ops.emb_wait_result(handle, DIM).shape == (4, DIM)


def test_a_prefetch_of_a_released_or_dropped_table_is_an_error(table_name: Callable[[], str]) -> None:
    name = table_name()
    handle = ops.make_hashtable(name, DIM)
    prefetch = ops.emb_prefetch(handle, IDS)
    ops.drop_table(name)
    with pytest.raises(RuntimeError, match="unknown, released or dropped"):
        ops.emb_prefetch(handle, IDS)
    try:
        assert ops.emb_wait_result(prefetch, DIM).shape == (4, DIM)  # Read before the table was dropped.
    except RuntimeError as error:
        assert "dropped" in str(error)  # noqa: PT017  (either outcome is right, it depends on who was first)


def test_rows_that_change_after_the_issue_come_back_changed(table: Table) -> None:
    prefetch = ops.emb_prefetch(table.handle, IDS)
    ops.emb_update(table.handle, IDS[:1], torch.ones(1, DIM))
    operators.accept_grad(table.collector, table.handle, IDS[1:2], torch.ones(1, DIM))
    operators.apply_grads([table.collector])
    expected = read(table, IDS)
    assert torch.equal(ops.emb_wait_result(prefetch, DIM), expected)


def test_several_tables_are_prefetched_in_one_call(table: Table, table_name: Callable[[], str]) -> None:
    other = Table(table_name(), 5)
    ids, splits = torch.tensor([1, 2, 3, 1]), torch.tensor([0, 3, 4])
    prefetch = ops.emb_prefetch([table.handle, other.handle], ids, splits)
    first, second = ops.emb_wait_tables(prefetch)
    assert torch.equal(first, read(table, ids[:3]))
    assert torch.equal(second, read(other, ids[3:]))
    with pytest.raises(RuntimeError, match="2 tables need 3 splits, got 2"):
        ops.emb_prefetch([table.handle, other.handle], ids, splits[:2])
    with pytest.raises(RuntimeError, match="must end at the 4 ids, got 3"):
        ops.emb_prefetch([table.handle, other.handle], ids, torch.tensor([0, 1, 3]))


def test_a_missing_default_table_is_read_when_it_is_asked_for() -> None:
    dim, ids = 23, torch.tensor([1, 2])
    early, late = ops.emb_prefetch(ids, dim), ops.emb_prefetch(ids, dim)
    assert ops.emb_wait_result(early, dim).eq(0).all()
    assert f"default/{dim}" not in recstore_ops.table_names()
    ops.emb_write(ids, torch.ones(2, dim))
    assert ops.emb_wait_result(late, dim).eq(1).all()
    assert ops.emb_wait_result(ops.emb_prefetch(ids, dim), dim).eq(1).all()


def test_abandoned_prefetches_are_dropped_oldest_first_with_a_warning(
    table: Table, capfd: pytest.CaptureFixture[str]
) -> None:
    first = ops.emb_prefetch(table.handle, IDS)
    handles = [ops.emb_prefetch(table.handle, IDS) for _ in range(1024)]
    assert "prefetches were dropped, oldest first" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="unknown, consumed or dropped"):
        ops.emb_wait_result(first, DIM)
    for handle in handles[-1:]:
        ops.emb_wait_result(handle, DIM)
    for handle in handles[:-1]:
        ops.emb_wait_result(handle, DIM)


def test_abandoned_prefetches_of_a_missing_default_table_leave_no_ids_behind() -> None:
    dim, ids = 31, torch.arange(25_000)
    handles = [ops.emb_prefetch(ids, dim) for _ in range(1100)]
    gc.collect()
    before = resident_bytes()
    for _ in range(1000):
        handles.append(ops.emb_prefetch(ids, dim))
    # 1000 more lists of ids would be 200 MB.
    assert resident_bytes() - before < 50e6
    with pytest.raises(RuntimeError, match="unknown, consumed or dropped"):
        ops.emb_wait_result(handles[0], dim)
    assert ops.emb_wait_result(handles[-1], dim).eq(0).all()
    for handle in handles[-1024:-1]:
        ops.emb_wait_result(handle, dim)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_left_behind(table: Table) -> None:
    ids = torch.randint(0, 10**6, (50_000,))
    ops.emb_write(table.handle, ids, torch.ones(len(ids), DIM))  # Else each round would draw their initial values.

    def rounds(count: int) -> None:
        for _ in range(count):
            handle = ops.emb_prefetch(table.handle, ids)
            ops.emb_update(table.handle, ids[:100], torch.ones(100, DIM))
            ops.emb_wait_result(handle, DIM)

    rounds(10)
    gc.collect()
    before = resident_bytes()
    rounds(100)
    # 100 rounds of rows, ids and changes would be 100 MB.
    gc.collect()
    assert resident_bytes() - before < 50e6


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.lists(st.integers(0, 5), max_size=6)),
        st.tuples(st.just("update"), st.lists(st.integers(0, 5), max_size=6)),
        st.tuples(st.just("write"), st.lists(st.integers(0, 5), min_size=1, max_size=2)),
        st.tuples(st.just("delete"), st.lists(st.integers(0, 5), min_size=1, max_size=2)),
        st.tuples(st.just("wait"), st.lists(st.integers(0, 9), min_size=1, max_size=1)),
        st.tuples(st.just("abandon"), st.just([0])),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=examples(60))
@given(acts=ACTS)
def test_a_prefetch_equals_a_read_for_any_schedule(acts: list[tuple[str, list[int]]]) -> None:
    table = Table(fresh_name(), DIM, TableConfig(optimizer={"kind": "adagrad", "lr": 0.1}))
    pending: list[tuple[int, Tensor]] = []
    for act, numbers in acts:
        ids = torch.tensor(numbers, dtype=torch.int64)
        if act == "issue":
            pending.append((ops.emb_prefetch(table.handle, ids), ids))
        elif act == "update":
            ops.emb_update(table.handle, ids, torch.ones(len(ids), DIM))
        elif act == "write":
            ops.emb_write(table.handle, ids, torch.full((len(ids), DIM), 3.0))
        elif act == "delete":
            ops.hashtable_delete(table.handle, ids)
        elif act == "abandon" and pending:
            pending.pop()
        elif act == "wait" and numbers[0] < len(pending):
            handle, issued = pending.pop(numbers[0])
            assert torch.equal(ops.emb_wait_result(handle, DIM), read(table, issued))


def test_a_forked_child_consumes_and_issues_prefetches_inline(table: Table) -> None:
    ops.emb_write(table.handle, IDS, torch.ones(4, DIM))
    inherited = ops.emb_prefetch(table.handle, IDS)
    child = os.fork()
    if child == 0:
        try:
            right = ops.emb_wait_result(inherited, DIM).eq(1).all()
            right &= ops.emb_wait_result(ops.emb_prefetch(table.handle, IDS), DIM).eq(1).all()
            os._exit(0 if right else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ops.emb_wait_result(inherited, DIM).eq(1).all()
