"""Every refusal: it says what was wrong, names the table, and leaves all tables as they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import recstore_ops
from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    SparseOptimizer,
    Table,
    TableConfig,
    _native,
    embedding,
    embedding_bag,
    get_kv_client,
    set_merge,
    table_names,
    table_statistics,
)
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("quick")

NUM, DIM = 10, 4
IDS = torch.tensor([1, 2])
NO_IDS = IDS[:0]
ROWS = torch.ones(2, DIM)
NOBODY = torch.tensor(2**40)
"""A collector's handle that was never given out."""

INF, NAN = math.inf, math.nan


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def table(table_name: Callable[[], str]) -> Table:
    """A table of ten ids, two of them with a row."""
    table = Table(table_name(), DIM, TableConfig(num_embeddings=NUM))
    operators.emb_write(table.handle, longs(1, 7), torch.tensor([[1.0] * DIM, [7.0] * DIM]))
    return table


def state(name: str) -> tuple[dict[str, Any], Tensor, Tensor]:
    """All that a table holds, apart from the count of refusals."""
    table = Table.open(name)
    ids = operators.hashtable_ids(table.handle)
    statistics = {**table.statistics(), "refusals": None}
    return statistics, ids, operators.emb_read(table.handle, ids, table.dim)


@contextmanager
def refused(name: str, error: type[Exception], *words: str) -> Iterator[None]:
    """Holds what follows to raise this very error with these words, and to change no table."""
    names, (statistics, ids, rows) = set(table_names()), state(name)
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    for word in words:
        assert word.format(name=name) in str(caught.value)
    statistics_now, ids_now, rows_now = state(name)
    assert statistics_now == statistics
    assert torch.equal(ids_now, ids)
    assert torch.equal(rows_now, rows)
    assert set(table_names()) <= names


Case = tuple[Callable[[Table], object], type[Exception], str]

WRONG_DTYPES: dict[str, Case] = {
    "read": (
        lambda t: operators.emb_read(t.handle, torch.tensor([1.0]), DIM),
        RuntimeError,
        "emb_read: ids must be int64, uint64, int32, int16, int8 or uint8, got Float",
    ),
    "write": (
        lambda t: operators.emb_write(t.handle, IDS.bool(), ROWS),
        RuntimeError,
        "emb_write: ids must be int64, uint64, int32, int16, int8 or uint8, got Bool",
    ),
    "update": (
        lambda t: operators.emb_update(t.handle, IDS.half(), ROWS),
        RuntimeError,
        "emb_update: ids must be int64, uint64, int32, int16, int8 or uint8, got Half",
    ),
    "delete": (
        lambda t: operators.hashtable_delete(t.handle, IDS.double()),
        RuntimeError,
        "hashtable_delete: ids must be int64, uint64, int32, int16, int8 or uint8, got Double",
    ),
    "lookup": (
        lambda t: operators.hashtable_lookup(t.handle, IDS.to(torch.uint16), DIM, True),
        RuntimeError,
        "hashtable_lookup: ids must be int64, uint64, int32, int16, int8 or uint8, got UInt16",
    ),
    "bag": (
        lambda t: operators.emb_bag(t.handle, IDS.float(), longs(0, 2), DIM, operators.SUM),
        RuntimeError,
        "emb_bag: ids must be int64, uint64, int32, int16, int8 or uint8, got Float",
    ),
    "offsets": (
        lambda t: operators.emb_bag(t.handle, IDS, torch.tensor([0.0, 2.0]), DIM, operators.SUM),
        RuntimeError,
        "emb_bag: offsets must be int64, uint64, int32, int16, int8 or uint8, got Float",
    ),
    "rows": (
        lambda t: operators.emb_write(t.handle, IDS, ROWS.long()),
        RuntimeError,
        "emb_write: rows must be floating point, got Long",
    ),
    "gradients": (
        lambda t: operators.emb_update(t.handle, IDS, ROWS.to(torch.complex64)),
        RuntimeError,
        "emb_update: gradients must be floating point, got ComplexFloat",
    ),
    "collected": (
        lambda t: operators.accept_grad(t.collector, t.handle, IDS, ROWS.int()),
        RuntimeError,
        "accept_grad: gradients must be floating point, got Int",
    ),
    "weights": (
        lambda t: operators.emb_bag(t.handle, IDS, longs(0, 2), DIM, operators.SUM, longs(1, 2)),
        RuntimeError,
        "emb_bag: per_sample_weights must be floating point, got Long",
    ),
    "function": (
        lambda t: embedding(IDS.float(), t),
        TypeError,
        "ids must be int64, uint64, int32, int16, int8 or uint8, got torch.float32",
    ),
    "no tensor": (
        lambda t: embedding([1, 2], t),  # type: ignore[arg-type]
        TypeError,
        "ids must be a tensor, got list",
    ),
    "nested": (
        lambda t: embedding(torch.nested.nested_tensor([IDS, IDS[:1]], layout=torch.jagged), t),
        TypeError,
        "ids must be a dense tensor, got a nested one: give its values() and offsets()",
    ),
    "sparse": (
        lambda t: embedding(IDS.to_sparse(), t),
        TypeError,
        "ids must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    "bag function": (
        lambda t: embedding_bag(IDS.float(), t, longs(0)),
        TypeError,
        "ids must be int64, uint64, int32, int16, int8 or uint8, got torch.float32",
    ),
    "bag function's offsets": (
        lambda t: embedding_bag(IDS, t, torch.tensor([0.0])),
        TypeError,
        "offsets must be int64 or int32, got torch.float32",
    ),
    "bag function's weights": (
        lambda t: embedding_bag(IDS, t, longs(0), "sum", ROWS[0, :2].double()),
        TypeError,
        "per_sample_weights must be float32, got torch.float64",
    ),
    "client": (
        lambda t: get_kv_client().pull(t.name, IDS.float()),
        TypeError,
        "ids must be int64, uint64, int32, int16, int8 or uint8, got torch.float32",
    ),
}

WRONG_SHAPES: dict[str, Case] = {
    "read": (
        lambda t: operators.emb_read(t.handle, IDS, 5),
        RuntimeError,
        'emb_read: table "{name}" has dim 4, got rows of 5',
    ),
    "read nothing": (
        lambda t: operators.emb_read(t.handle, NO_IDS, 5),
        RuntimeError,
        'emb_read: table "{name}" has dim 4, got rows of 5',
    ),
    "read more than there is memory for": (
        lambda t: operators.emb_read(t.handle, IDS, 2**62),
        RuntimeError,
        'emb_read: table "{name}" has dim 4, got rows of 4611686018427387904',
    ),
    "read dim 0": (
        lambda t: operators.emb_read(t.handle, IDS, 0),
        RuntimeError,
        "emb_read: dim must be at least 1, got 0",
    ),
    "write": (
        lambda t: operators.emb_write(t.handle, IDS, torch.zeros(2, 3)),
        RuntimeError,
        'emb_write: table "{name}" has dim 4, got rows of 3',
    ),
    "write nothing": (
        lambda t: operators.emb_write(t.handle, NO_IDS, torch.zeros(0, 3)),
        RuntimeError,
        'emb_write: table "{name}" has dim 4, got rows of 3',
    ),
    "write too many rows": (
        lambda t: operators.emb_write(t.handle, IDS, torch.zeros(3, DIM)),
        RuntimeError,
        'emb_write: table "{name}" got ids of shape [2], so rows must have that shape and dim, got [3, 4]',
    ),
    "write flat rows": (
        lambda t: operators.emb_write(t.handle, IDS, torch.zeros(2 * DIM)),
        RuntimeError,
        'emb_write: table "{name}" got ids of shape [2], so rows must have that shape and dim, got [8]',
    ),
    "update": (
        lambda t: operators.emb_update(t.handle, IDS, torch.zeros(2, 3)),
        RuntimeError,
        'emb_update: table "{name}" has dim 4, got gradient rows of 3',
    ),
    "update nothing": (
        lambda t: operators.emb_update(t.handle, NO_IDS, torch.zeros(0, 3)),
        RuntimeError,
        'emb_update: table "{name}" has dim 4, got gradient rows of 3',
    ),
    "update of another rank": (
        lambda t: operators.emb_update(t.handle, IDS, torch.zeros(2, 1, DIM)),
        RuntimeError,
        'emb_update: table "{name}" got ids of shape [2], so gradients must have that shape and dim, got [2, 1, 4]',
    ),
    "collect": (
        lambda t: operators.accept_grad(t.collector, t.handle, IDS, torch.zeros(2, 3)),
        RuntimeError,
        'accept_grad: table "{name}" has dim 4, got gradient rows of 3',
    ),
    "lookup": (
        lambda t: operators.hashtable_lookup(t.handle, IDS, 5, True),
        RuntimeError,
        'hashtable_lookup: table "{name}" has dim 4, got rows of 5',
    ),
    "bag": (
        lambda t: operators.emb_bag(t.handle, IDS, longs(0, 2), 5, operators.SUM),
        RuntimeError,
        'emb_bag: table "{name}" has dim 4, got pooled rows of 5',
    ),
    "no bag": (
        lambda t: operators.emb_bag(t.handle, NO_IDS, longs(0), 5, operators.SUM),
        RuntimeError,
        'emb_bag: table "{name}" has dim 4, got pooled rows of 5',
    ),
    "bag of 2-d ids": (
        lambda t: operators.emb_bag(t.handle, IDS[None], longs(0, 2), DIM, operators.SUM),
        RuntimeError,
        "emb_bag: ids must be 1-d, got shape [1, 2]",
    ),
    "bags of no table": (
        lambda t: operators.emb_bag_tables([], IDS, longs(0, 2), [], operators.SUM),
        RuntimeError,
        "emb_bag: 0 tables need as many dims",
    ),
    "bags of a table without dim": (
        lambda t: operators.emb_bag_tables([t.handle, t.handle], IDS, longs(0, 1, 2), [DIM], operators.SUM),
        RuntimeError,
        "emb_bag: 2 tables need as many dims and as many bags each, got 1 dims and 2 bags",
    ),
    "bags of another dim": (
        lambda t: operators.emb_bag_tables([t.handle, t.handle], IDS, longs(0, 1, 2), [DIM, 5], operators.SUM),
        RuntimeError,
        'emb_bag: table "{name}" has dim 4, got pooled rows of 5',
    ),
    "merge": (
        lambda t: operators.merge_gradients(IDS, torch.zeros(3, DIM)),
        RuntimeError,
        "gradients must have that shape and dim, got [3, 4]",
    ),
    "bag function's 3-D ids": (
        lambda t: embedding_bag(IDS[None, None], t),
        ValueError,
        "ids of bags must be 1-D or 2-D, got 3-D",
    ),
    "bag function's 2-D offsets": (
        lambda t: embedding_bag(IDS, t, longs(0)[None]),
        ValueError,
        "offsets must be 1-D, got 2-D",
    ),
}

WRONG_BAGS: dict[str, Case] = {
    "missing offsets": (
        lambda t: embedding_bag(IDS, t),
        ValueError,
        "offsets must be given for 1-D ids",
    ),
    "needless offsets": (
        lambda t: embedding_bag(IDS[None], t, longs(0)),
        ValueError,
        "offsets must be None for 2-D ids",
    ),
    "function's first offset": (
        lambda t: embedding_bag(IDS, t, longs(1)),
        RuntimeError,
        "emb_bag: offsets must start at 0, got 1",
    ),
    "function's last offset": (
        lambda t: embedding_bag(IDS, t, longs(0, 3), include_last_offset=True),
        RuntimeError,
        "emb_bag: offsets must end at the 2 ids, got 3",
    ),
    "mode": (
        lambda t: embedding_bag(IDS, t, longs(0), "median"),  # type: ignore[arg-type]
        ValueError,
        'mode must be "sum", "mean" or "max", got \'median\'',
    ),
    "mode number": (
        lambda t: operators.emb_bag(t.handle, IDS, longs(0, 2), DIM, 3),
        RuntimeError,
        "emb_bag: mode must be 0 (sum), 1 (mean) or 2 (max), got 3",
    ),
    "the function's weights for max": (
        lambda t: embedding_bag(IDS, t, longs(0), "max", torch.ones(2)),
        ValueError,
        'per_sample_weights need mode "sum" or "mean", got mode \'max\'',
    ),
    "weights for max": (
        lambda t: operators.emb_bag(t.handle, IDS, longs(0, 2), DIM, operators.MAX, torch.ones(2)),
        RuntimeError,
        "emb_bag: per_sample_weights go with sum and mean, not with max",
    ),
    "too many weights": (
        lambda t: embedding_bag(IDS, t, longs(0), "sum", torch.ones(3)),
        ValueError,
        "per_sample_weights must have the shape of the ids, (2,), got (3,)",
    ),
    "too few weights": (
        lambda t: operators.emb_bag(t.handle, IDS, longs(0, 2), DIM, operators.SUM, torch.ones(1)),
        RuntimeError,
        "emb_bag: expected 2 per_sample_weights, one an id, got 1",
    ),
    "merge": (lambda t: set_merge("fast"), ValueError, "set_merge takes"),  # type: ignore[arg-type]
}

OFFSETS: dict[str, tuple[list[int], str]] = {
    "none": ([], "offsets must hold at least the end of the last bag, got none"),
    "a late start": ([1, 2], "offsets must start at 0, got 1"),
    "a negative start": ([-1, 2], "offsets must start at 0, got -1"),
    "a fall": ([0, 2, 1], "offsets must not fall, got 1 after 2 at position 2"),
    "a fall below 0": ([0, -1, 2], "offsets must not fall, got -1 after 0 at position 1"),
    "a huge offset": (
        [0, 2**62, 2],
        "offsets must not exceed the number of ids, 2, got 4611686018427387904 at position 1",
    ),
    "an end too early": ([0, 1], "offsets must end at the 2 ids, got 1"),
    "an end too late": ([0, 3], "offsets must end at the 2 ids, got 3"),
    "an end far too late": ([0, 2**63 - 1], "offsets must end at the 2 ids, got 9223372036854775807"),
}

HANDLE_CALLS: dict[str, Callable[[Tensor], object]] = {
    "emb_read": lambda handle: operators.emb_read(handle, IDS, DIM),
    "emb_write": lambda handle: operators.emb_write(handle, IDS, ROWS),
    "emb_update": lambda handle: operators.emb_update(handle, IDS, ROWS),
    "emb_bag": lambda handle: operators.emb_bag(handle, IDS, longs(0, 2), DIM, operators.SUM),
    "hashtable_lookup": lambda handle: operators.hashtable_lookup(handle, IDS, DIM, True),
    "hashtable_delete": lambda handle: operators.hashtable_delete(handle, IDS),
    "hashtable_clear": operators.hashtable_clear,
    "hashtable_ids": operators.hashtable_ids,
    "hashtable_size": operators.hashtable_size,
    "set_learning_rate": lambda handle: operators.set_learning_rate(handle, 0.5),
    "accept_grad": lambda handle: operators.accept_grad(operators.make_collector(), handle, IDS, ROWS),
    "collected_grads": lambda handle: operators.collected_grads(operators.make_collector(), handle),
}

COLLECTOR_CALLS: dict[str, Callable[[Tensor], object]] = {
    "collector_release": operators.collector_release,
    "apply_grads": lambda collector: operators.apply_grads([collector]),
    "clear_grads": operators.clear_grads,
    "collected_tables": operators.collected_tables,
}

OUT_OF_RANGE: dict[str, Callable[[Table, Tensor], object]] = {
    "emb_read: ": lambda t, ids: operators.emb_read(t.handle, ids, DIM),
    "emb_write: ": lambda t, ids: operators.emb_write(t.handle, ids, torch.ones(*ids.shape, DIM)),
    "emb_update: ": lambda t, ids: operators.emb_update(t.handle, ids, torch.ones(*ids.shape, DIM)),
    "emb_bag: ": lambda t, ids: embedding_bag(ids, t),
    "hashtable_lookup: ": lambda t, ids: operators.hashtable_lookup(t.handle, ids, DIM, True),
    "": lambda t, ids: embedding(ids, t),
}


@pytest.mark.parametrize("case", WRONG_DTYPES.values(), ids=WRONG_DTYPES)
def test_a_wrong_dtype_is_refused_with_what_came(case: Case, table: Table) -> None:
    call, error, words = case
    with refused(table.name, error, words):
        call(table)


@pytest.mark.parametrize("case", WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_a_wrong_shape_is_refused_with_what_was_expected(case: Case, table: Table) -> None:
    call, error, words = case
    with refused(table.name, error, words):
        call(table)


@pytest.mark.parametrize("case", WRONG_BAGS.values(), ids=WRONG_BAGS)
def test_a_wrong_option_of_a_bag_is_refused(case: Case, table: Table) -> None:
    call, error, words = case
    with refused(table.name, error, words):
        call(table)


@pytest.mark.parametrize(("offsets", "words"), OFFSETS.values(), ids=OFFSETS)
def test_malformed_offsets_are_refused_with_their_position(offsets: list[int], words: str, table: Table) -> None:
    with refused(table.name, RuntimeError, f"emb_bag: {words}"):
        operators.emb_bag(table.handle, IDS, longs(*offsets), DIM, operators.SUM)
    with refused(table.name, RuntimeError, f"emb_bag: {words}"):
        operators.emb_bag_tables([table.handle], IDS, longs(*offsets), [DIM], operators.MAX)


@pytest.mark.parametrize("operation", HANDLE_CALLS)
def test_a_handle_that_is_none_is_refused(operation: str, table: Table) -> None:
    call = HANDLE_CALLS[operation]
    unmarked = f"{operation}: table must be a handle as make_hashtable gives it, got other numbers of its shape"
    with refused(table.name, RuntimeError, unmarked):
        call(torch.zeros_like(table.handle))
    shape = list(table.handle.shape)
    for handle, text in [
        (torch.tensor([1]), "Long of shape [1]"),
        (NOBODY, "Long of shape []"),
        (table.handle.float(), f"Float of shape {shape}"),
        (table.handle.int(), f"Int of shape {shape}"),
    ]:
        expected = f"{operation}: table must be a handle, a contiguous int64 CPU tensor of shape {shape}, got {text}"
        with refused(table.name, RuntimeError, expected):
            call(handle)


@pytest.mark.parametrize("operation", HANDLE_CALLS)
def test_a_released_handle_is_refused(operation: str, table: Table, table_name: Callable[[], str]) -> None:
    name = table_name()
    handle = operators.make_hashtable(name, DIM)
    operators.hashtable_release(handle)
    expected = f'{operation}: table "{name}" is not open in this process; open it first, by a module or make_hashtable'
    with refused(table.name, RuntimeError, expected):
        HANDLE_CALLS[operation](handle)


@pytest.mark.parametrize("operation", HANDLE_CALLS)
def test_a_handle_from_another_process_means_the_table_of_its_name(operation: str, table: Table) -> None:
    foreign = table.handle.clone()
    foreign[0] += 1
    HANDLE_CALLS[operation](foreign)


@pytest.mark.parametrize("operation", HANDLE_CALLS)
def test_a_dropped_table_is_refused_by_name(operation: str, table: Table, table_name: Callable[[], str]) -> None:
    dropped = Table(table_name(), DIM)
    operators.drop_table(dropped.name)
    with refused(table.name, RuntimeError, f'{operation}: table "{dropped.name}" was dropped'):
        HANDLE_CALLS[operation](dropped.handle)


@pytest.mark.parametrize("operation", COLLECTOR_CALLS)
def test_an_unknown_collector_is_refused(operation: str, table: Table) -> None:
    released = operators.make_collector()
    operators.collector_release(released)
    for collector in [NOBODY, released, table.handle[0]]:
        expected = f"{operation}: collector handle {collector.item()} is unknown, released or of another process"
        with refused(table.name, RuntimeError, expected):
            COLLECTOR_CALLS[operation](collector)


def test_a_collector_is_no_table_and_a_table_no_collector(table: Table) -> None:
    with refused(table.name, RuntimeError, "emb_read: table must be a handle"):
        operators.emb_read(table.collector, IDS, DIM)
    with refused(table.name, RuntimeError, "clear_grads: collector must be a handle, a contiguous int64 CPU tensor of"):
        operators.clear_grads(table.handle)


def test_an_update_rule_that_nobody_registered_is_named(table_name: Callable[[], str]) -> None:
    name = table_name()
    with pytest.raises(ValueError, match=r'the update rule "mine" is not registered with this store, which has \['):
        Table(name, DIM, TableConfig(optimizer={"kind": "rule", "name": "mine"}))
    assert name not in table_names()


def test_an_unknown_name_is_refused(table: Table) -> None:
    with refused(table.name, RuntimeError, 'drop_table: there is no table "nobody"'):
        operators.drop_table("nobody")
    with refused(table.name, KeyError, 'there is no table "nobody"'):
        Table.open("nobody")
    with refused(table.name, KeyError, 'there is no table "nobody"'):
        table_statistics("nobody")


@pytest.mark.parametrize("operation", OUT_OF_RANGE)
@pytest.mark.parametrize("id", [NUM, -1, -(2**63), 2**63 - 1])
def test_an_id_out_of_range_is_an_index_error_with_table_id_and_position(operation: str, id: int, table: Table) -> None:
    expected = f'{operation}id {id} at position 3 is out of range for table "{{name}}" with num_embeddings {NUM}'
    with refused(table.name, IndexError, expected):
        OUT_OF_RANGE[operation](table, longs(0, 1, 2, id, 3, id).reshape(2, 3))


def test_a_uint64_id_out_of_range_is_an_index_error(table: Table) -> None:
    with refused(table.name, IndexError, "id -1 at position 1 is out of range"):
        embedding(torch.tensor([1, 2**64 - 1], dtype=torch.uint64), table)


def test_modules_refuse_an_id_out_of_range(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name())
    bag = DistEmbeddingBag(NUM, DIM, table_name())
    with refused(module.name, IndexError, "id 10 at position 1", '"{name}" with num_embeddings 10'):
        module(longs(9, 10))
    with refused(bag.name, IndexError, "id 10 at position 1", '"{name}" with num_embeddings 10'):
        bag(longs(9, 10), longs(0, 1))


def test_bags_of_several_tables_name_the_position_in_the_call(table: Table) -> None:
    expected = 'emb_bag: id 10 at position 2 is out of range for table "{name}"'
    with refused(table.name, IndexError, expected):
        operators.emb_bag_tables(
            [table.handle, table.handle], longs(1, 2, NUM), longs(0, 2, 3), [DIM, DIM], operators.SUM
        )


def test_collected_ids_out_of_range_are_refused_by_the_step(table: Table) -> None:
    operators.accept_grad(table.collector, table.handle, longs(1, NUM), ROWS)
    with refused(table.name, IndexError, f'id {NUM} at position 1 is out of range for table "{{name}}"'):
        SparseOptimizer(modules=[table]).step()


def bad_rows(value: float) -> Tensor:
    """Rows of the ids 1, 7 and 5, the last of which is not finite."""
    rows = torch.ones(3, DIM)
    rows[2, 1] = value
    return rows


@pytest.fixture(params=[NAN, INF, -INF])
def not_finite(request: pytest.FixtureRequest) -> float:
    return request.param


def spelt(value: float) -> str:
    return "NaN" if math.isnan(value) else str(value)


def test_a_value_that_is_not_finite_is_refused_with_table_id_and_position(not_finite: float, table: Table) -> None:
    ids, rows = longs(1, 7, 5), bad_rows(not_finite)
    where = f'of id 5 at position 2 of table "{{name}}" holds {spelt(not_finite)}'
    with refused(table.name, RuntimeError, f"emb_write: row {where}"):
        operators.emb_write(table.handle, ids, rows)
    with refused(table.name, RuntimeError, f"emb_update: gradient {where}"):
        operators.emb_update(table.handle, ids, rows)
    assert table.statistics()["refusals"] == 2


def test_the_operator_that_failed_is_known_by_the_error_on_whatever_thread_it_arose(table: Table) -> None:
    class Failing(torch.autograd.Function):
        """Fails in its backward pass, on the thread that autograd runs it on."""

        @staticmethod
        def forward(ctx: Any, values: Tensor, id: int) -> Tensor:
            ctx.id = id
            return values * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return operators.emb_read(table.handle, longs(ctx.id), DIM)

    def failed(id: int) -> BaseException:
        with pytest.raises(IndexError, match=f"emb_read: id {id} at position 0") as raised:
            Failing.apply(torch.ones(DIM, requires_grad=True), id).sum().backward()
        return raised.value

    with ThreadPoolExecutor(4) as threads:
        errors = list(threads.map(failed, range(NUM, NUM + 40)))
    assert [_native.failed_operator(str(error)) for error in errors] == ["emb_read"] * 40
    with pytest.raises(RuntimeError) as of_arguments:
        operators.emb_update(table.handle, IDS.float(), ROWS)
    assert _native.failed_operator(str(of_arguments.value)) == "emb_update"
    # A text alone is no error of an operator.
    assert _native.failed_operator("emb_update: the text of another program") is None


def test_gradients_whose_sum_overflows_are_refused(table: Table) -> None:
    grads = torch.full((3, DIM), 3e38)
    expected = 'emb_update: summed gradient of id 1 at position 1 of table "{name}" holds inf'
    with refused(table.name, RuntimeError, expected):
        operators.emb_update(table.handle, longs(7, 1, 1), grads)


def test_a_double_that_overflows_single_precision_is_refused(table: Table) -> None:
    with refused(table.name, RuntimeError, "row of id 1 at position 0", "holds inf"):
        operators.emb_write(table.handle, longs(1), torch.full((1, DIM), 1e300, dtype=torch.float64))


def test_a_collected_gradient_that_is_not_finite_is_refused_by_the_step(table: Table) -> None:
    embedding(longs(1, 7, 5), table).backward(bad_rows(NAN))
    with refused(table.name, RuntimeError, 'gradient of id 5 at position 2 of table "{name}" holds NaN'):
        SparseOptimizer(modules=[table]).step()


def test_the_policy_skip_leaves_out_and_counts_what_is_not_finite(
    not_finite: float, table_name: Callable[[], str]
) -> None:
    config = TableConfig(nan_policy="skip", initializer={"kind": "zeros"}, optimizer={"kind": "sgd", "lr": 1.0})
    table = Table(table_name(), DIM, config)
    ids = longs(1, 7, 5)

    operators.emb_write(table.handle, ids, bad_rows(not_finite))
    assert operators.hashtable_ids(table.handle).tolist() == [1, 7]
    operators.emb_update(table.handle, ids, bad_rows(not_finite))

    assert operators.hashtable_ids(table.handle).tolist() == [1, 7]
    assert operators.emb_read(table.handle, ids, DIM).eq(0).all()
    assert (table.statistics()["refusals"], table.statistics()["step"]) == (2, 1)


def test_the_policy_skip_skips_an_id_alike_whether_its_gradients_come_merged_or_not(
    table_name: Callable[[], str],
) -> None:
    config = TableConfig(nan_policy="skip", initializer={"kind": "zeros"}, optimizer={"kind": "sgd", "lr": 1.0})
    ids, grads = longs(5, 5, 6, 5), torch.tensor([[1.0], [NAN], [4.0], [2.0]])
    for merge in (lambda *pair: pair, recstore_ops.merge_gradients):
        table = Table(table_name(), 1, config)
        operators.emb_update(table.handle, *merge(ids, grads))
        assert operators.emb_read(table.handle, longs(5, 6), 1).tolist() == [[0.0], [-4.0]]
        assert table.statistics()["refusals"] == 1


def test_the_policy_allow_takes_values_as_they_are(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 1, TableConfig(nan_policy="allow"))
    operators.emb_write(table.handle, longs(1, 2, 3), torch.tensor([[NAN], [INF], [1.0]]))
    operators.emb_update(table.handle, longs(3), torch.tensor([[INF]]))
    rows = operators.emb_read(table.handle, longs(1, 2, 3), 1).flatten().tolist()
    assert math.isnan(rows[0])
    assert rows[1:] == [INF, -INF]
    assert table.statistics()["refusals"] == 0


def test_a_name_with_another_configuration_is_refused_with_both(table: Table) -> None:
    for dim, config, theirs in [
        (5, TableConfig(num_embeddings=NUM), "dim 5"),
        (DIM, TableConfig(num_embeddings=11), '"num_embeddings":11'),
        (DIM, TableConfig(num_embeddings=NUM, seed=3), '"seed":3'),
        (DIM, TableConfig(num_embeddings=NUM, optimizer={"kind": "adam"}), '"kind":"adam"'),
        (DIM, TableConfig(num_embeddings=NUM, initializer={"kind": "zeros"}), '"kind":"zeros"'),
        (DIM, TableConfig(num_embeddings=NUM, nan_policy="skip"), '"nan_policy":"skip"'),
    ]:
        ours = '"{name}" exists with the configuration dim 4 {{"num_embeddings":10'
        with refused(table.name, ValueError, ours, f"differs from the requested dim {dim}", theirs):
            Table(table.name, dim, config)


def test_another_learning_rate_or_weight_decay_is_no_other_configuration(table: Table) -> None:
    optimizer = {"kind": "sgd", "lr": 9.0, "weight_decay": 0.5}
    again = Table(table.name, DIM, TableConfig(num_embeddings=NUM, optimizer=optimizer))
    assert again.table_id == table.table_id
    assert table.statistics()["learning_rate"] == 0.01


WRONG_CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "optimizer": ({"optimizer": "sign"}, ["sign", "rowwise_adagrad"]),
    "hyper-parameter": ({"optimizer": {"kind": "sgd", "dampening": 0.9}}, ["dampening", "weight_decay"]),
    "optimizer without kind": ({"optimizer": {"lr": 0.1}}, ["missing field `kind`"]),
    "text as a rate": ({"optimizer": {"kind": "sgd", "lr": "high"}}, ["high"]),
    "initializer": ({"initializer": "orthogonal"}, ["orthogonal", "xavier_uniform"]),
    "initializer's key": ({"initializer": {"kind": "zeros", "std": 1}}, ["std"]),
    "dtype": ({"dtype": torch.float8_e5m2}, ["float8_e5m2", "float32"]),
    "policy": ({"nan_policy": "ignore"}, ["ignore", "skip"]),
    "convention": ({"optimizer": {"kind": "adagrad", "convention": "tf"}}, ["tf", "torch"]),
    "lr below 0": ({"lr": -1.5}, ["optimizer.lr", "-1.5"]),
    "lr NaN": ({"lr": NAN}, ["optimizer.lr"]),
    "lr infinite": ({"lr": INF}, ["optimizer.lr", "inf"]),
    "lr beyond float32": ({"lr": 1e300}, ["optimizer.lr"]),
    "weight_decay": ({"optimizer": {"kind": "sgd", "weight_decay": -1}}, ["optimizer.weight_decay", "-1"]),
    "betas": ({"optimizer": {"kind": "adam", "betas": [0.9, 1.0]}}, ["optimizer.betas", "got 1"]),
    "momentum": ({"optimizer": {"kind": "sgd", "momentum": 1.0}}, ["optimizer.momentum", "[0, 1)", "got 1"]),
    "momentum of rmsprop": ({"optimizer": {"kind": "rmsprop", "momentum": -0.5}}, ["optimizer.momentum", "got -0.5"]),
    "catch_up with momentum": (
        {"optimizer": {"kind": "sgd", "momentum": 0.5, "weight_decay": 0.25, "catch_up": True}},
        ["optimizer.catch_up", "both are not caught up with, got 0.5 and 0.25"],
    ),
    "catch_up with narrow rows": (
        {"optimizer": {"kind": "adamw", "catch_up": True}, "dtype": torch.bfloat16},
        ["optimizer.catch_up needs rows of float32, got bfloat16"],
    ),
    "catch_up with narrow state": (
        {"optimizer": {"kind": "lion", "catch_up": True}, "state_dtype": "float8"},
        ["optimizer.catch_up needs a state_dtype of float32"],
    ),
    "no such state_dtype": ({"optimizer": "adam", "state_dtype": "float16"}, ["float16", "bfloat16", "float8"]),
    "state_dtype without state": ({"state_dtype": torch.bfloat16}, ["state_dtype", "this one does not"]),
    "state_dtype of one value a row": (
        {"optimizer": "rowwise_adagrad", "state_dtype": "float8"},
        ["state_dtype goes with rules that keep something for each element of a row"],
    ),
    "state_dtype of centered": (
        {"optimizer": {"kind": "rmsprop", "centered": True}, "state_dtype": "bfloat16"},
        ["state_dtype does not go with optimizer.centered"],
    ),
    "catch_up with averages": (
        {"optimizer": {"kind": "lion", "catch_up": True}, "ema_decay": 0.5},
        ["optimizer.catch_up and ema_decay do not go together"],
    ),
    "nesterov": ({"optimizer": {"kind": "sgd", "nesterov": True}}, ["optimizer.nesterov needs a momentum above 0"]),
    "decay of rmsprop": ({"optimizer": {"kind": "rmsprop", "alpha": 1.5}}, ["optimizer.alpha", "got 1.5"]),
    "eps of rmsprop": ({"optimizer": {"kind": "rmsprop", "eps": 0.0}}, ["optimizer.eps", "got 0"]),
    "rho": ({"optimizer": {"kind": "adadelta", "rho": 1.0}}, ["optimizer.rho", "got 1"]),
    "eps of adadelta": ({"optimizer": {"kind": "adadelta", "eps": -1.0}}, ["optimizer.eps", "got -1"]),
    "betas of lion": ({"optimizer": {"kind": "lion", "betas": [1.0, 0.9]}}, ["optimizer.betas", "got 1"]),
    "eps of lion": ({"optimizer": {"kind": "lion", "eps": 0.1}}, ["eps", "betas"]),
    "amsgrad of lamb": ({"optimizer": {"kind": "lamb", "amsgrad": True}}, ["amsgrad", "bias_correction"]),
    "max_grad_norm": ({"max_grad_norm": 0.0}, ["max_grad_norm", "got 0"]),
    "ema_decay": ({"ema_decay": 1.0}, ["ema_decay", "[0, 1)", "got 1"]),
    "max_grad_norm NaN": ({"max_grad_norm": NAN}, ["max_grad_norm"]),
    "lr_decay": ({"optimizer": {"kind": "adagrad", "lr_decay": -0.1}}, ["optimizer.lr_decay", "-0.1"]),
    "eps": ({"optimizer": {"kind": "adagrad", "eps": 0.0}}, ["optimizer.eps", "got 0"]),
    "alpha": ({"optimizer": {"kind": "ftrl", "alpha": 0.0}}, ["optimizer.alpha", "got 0"]),
    "std": ({"initializer": {"kind": "normal", "std": -2.0}}, ["initializer.std", "-2"]),
    "bounds": ({"initializer": {"kind": "uniform", "a": 2.0}}, ["initializer.a", "got 2 and 1"]),
    "gain without bound": ({"initializer": "xavier_uniform"}, ["xavier_uniform needs num_embeddings"]),
    "block_size": ({"block_size": 0}, ["block_size", "got 0"]),
    "block_size below 0": ({"block_size": -1}, ["-1"]),
    "seed below 0": ({"seed": -1}, ["-1"]),
    "seed beyond 64 bits": ({"seed": 2**64}, ["seed must be an integer of 64 bits, got 18446744073709551616"]),
    "huge block": ({"block_size": 2**40}, ["block_size 1099511627776"]),
}


@pytest.mark.parametrize(("options", "words"), WRONG_CONFIGURATIONS.values(), ids=WRONG_CONFIGURATIONS)
def test_a_wrong_configuration_is_refused_and_opens_no_table(
    options: dict[str, Any], words: list[str], table: Table, table_name: Callable[[], str]
) -> None:
    with refused(table.name, ValueError, *words):
        DistEmbedding(None, DIM, table_name(), **options)


@pytest.mark.parametrize(
    ("num_embeddings", "dim", "words"),
    [
        (0, DIM, ["num_embeddings", "0"]),
        (-5, DIM, ["-5"]),
        (2.5, DIM, ["2.5"]),
        (2**63, DIM, ["num_embeddings", str(2**63)]),
        (NUM, 0, ["dim must be at least 1, got 0"]),
        (NUM, -1, ["dim must be at least 1, got -1"]),
        (NUM, 1.5, ["dim", "1.5"]),
        (NUM, True, ["dim must be an integer, got True"]),
        (NUM, 2**50, ["dim", str(2**50)]),
    ],
)
def test_a_wrong_size_is_refused_and_opens_no_table(
    num_embeddings: Any, dim: Any, words: list[str], table: Table, table_name: Callable[[], str]
) -> None:
    with refused(table.name, ValueError, *words):
        DistEmbedding(num_embeddings, dim, table_name())


@pytest.mark.parametrize(
    "config",
    [
        '{"learning_rate": 1}',
        "[]",
        '{"optimizer": ["sgd", 0.5]}',
        "{",
        '{"optimizer": {"kind": "sgd"}} x',
        '{"seed": NaN}',
        '{"seed": 1, "seed": 2}',
    ],
)
def test_a_malformed_json_configuration_is_refused(config: str, table: Table, table_name: Callable[[], str]) -> None:
    with refused(table.name, RuntimeError, "invalid table configuration: "):
        operators.make_hashtable(table_name(), DIM, config)


def test_a_table_needs_a_name(table: Table) -> None:
    with refused(table.name, ValueError, "the table's name must not be empty"):
        DistEmbedding(NUM, DIM, "")
    with refused(table.name, RuntimeError, "the table's name must not be empty"):
        operators.make_hashtable("", DIM)


@pytest.mark.parametrize("padding_idx", [NUM, -NUM - 1])
def test_a_padding_idx_out_of_range_is_refused_and_opens_no_table(
    padding_idx: int, table: Table, table_name: Callable[[], str]
) -> None:
    for module in (DistEmbedding, DistEmbeddingBag):
        expected = f"padding_idx must be within num_embeddings {NUM}, got {padding_idx}"
        with refused(table.name, ValueError, expected):
            module(NUM, DIM, table_name(), padding_idx=padding_idx)


@pytest.mark.parametrize("padding_idx", [2**63, -(2**63) - 1])
def test_a_padding_idx_that_is_no_int64_is_refused_and_opens_no_table(
    padding_idx: int, table: Table, table_name: Callable[[], str]
) -> None:
    with refused(table.name, ValueError, "padding_idx", str(padding_idx)):
        DistEmbedding(None, DIM, table_name(), padding_idx=padding_idx)


@pytest.mark.parametrize("value", [-1.0, NAN, INF, 1e300])
def test_a_wrong_learning_rate_is_refused(value: float, table: Table) -> None:
    expected = 'table "{name}": the learning rate must be finite and not negative'
    with refused(table.name, RuntimeError, expected):
        operators.set_learning_rate(table.handle, value)
    with refused(table.name, ValueError, expected):
        get_kv_client().set_learning_rate(table.name, value)
    with refused(table.name, ValueError, "learning rate"):
        SparseOptimizer(lr=value, modules=[table])


@pytest.mark.parametrize("value", [True, False, torch.tensor(True), np.True_])
def test_a_truth_value_is_no_learning_rate(value: Any, table: Table) -> None:
    expected = f"the learning rate must be a number, got {value!r}"
    with refused(table.name, TypeError, f'table "{table.name}": {expected}'):
        get_kv_client().set_learning_rate(table.name, value)
    with refused(table.name, TypeError, expected):
        SparseOptimizer(lr=value, modules=[table])


def test_a_value_that_is_none_of_json_is_named_by_its_key(table: Table, table_name: Callable[[], str]) -> None:
    form = "expected numbers, strings, lists and dicts, got a value of type"
    with refused(table.name, TypeError, f"optimizer.weight_decay: {form} Tensor"):
        DistEmbedding(None, DIM, table_name(), optimizer={"kind": "sgd", "weight_decay": torch.tensor(0.1)})
    with refused(table.name, TypeError, f"eviction.keep: {form} ndarray"):
        DistEmbedding(None, DIM, table_name(), eviction={"ttl": 10, "keep": np.arange(3)})
    with refused(table.name, TypeError, f"eviction.keep: {form} int64"):
        DistEmbedding(None, DIM, table_name(), eviction={"ttl": 10, "keep": [1, np.int64(2)]})


def test_a_name_that_is_none_is_refused_in_words(table: Table) -> None:
    with refused(table.name, TypeError, "the name of a table must be a text, got None"):
        DistEmbedding(None, DIM, None)  # type: ignore[arg-type]
    with refused(table.name, ValueError, r"the name of a table must be valid Unicode, got '\udcff'"):
        DistEmbedding(None, DIM, "\udcff")


def test_a_failing_call_on_a_default_table_does_not_create_it(table: Table) -> None:
    dim = 1009
    for call in (torch.ops.recstore.emb_write, torch.ops.recstore.emb_update):
        with refused(table.name, RuntimeError, f'id 1 at position 0 of table "default/{dim}" holds NaN'):
            call(longs(1), torch.full((1, dim), NAN))


def test_a_default_table_is_refused_rows_of_another_shape(table: Table) -> None:
    with refused(table.name, RuntimeError, 'table "default/1013" got ids of shape [2]', "got [3, 1013]"):
        torch.ops.recstore.emb_write(IDS, torch.zeros(3, 1013))
    with refused(table.name, RuntimeError, "dim must be at least 1, got 0"):
        torch.ops.recstore.emb_update(IDS, torch.zeros(2, 0))
    with refused(table.name, RuntimeError, "dim must be at least 1, got -1"):
        torch.ops.recstore.emb_read(IDS, -1)


def test_a_panic_in_rust_is_a_runtime_error_and_the_process_lives_on(
    table: Table, capfd: pytest.CaptureFixture[str]
) -> None:
    for message in ("boom", "", "na\u00efve\n"):
        with refused(table.name, RuntimeError, f"recstore: internal panic: {message}"):
            torch.ops.recstore._panic(message)
    operators.emb_update(table.handle, IDS, ROWS)
    assert table.statistics()["step"] == 1
    assert "boom" in capfd.readouterr().err


def test_a_block_as_large_as_may_be_costs_only_the_rows_written(table_name: Callable[[], str]) -> None:
    largest = 2**28 // 3
    table = Table(table_name(), 1, TableConfig(block_size=largest, optimizer={"kind": "adam"}))
    operators.emb_update(table.handle, longs(1), torch.ones(1, 1))
    assert table.statistics()["bytes"] < 1_000_000
    operators.drop_table(table.name)
    with pytest.raises(ValueError, match=f"block_size {largest + 1} and dim 1"):
        Table(table.name, 1, TableConfig(block_size=largest + 1))
