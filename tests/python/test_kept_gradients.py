"""Gradients between backward and the step: kept as they are, without a copy, their rows taken from the lookup.

Pairs of tables start with the same rows; what was done to one is held against what was done to the other, to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    Table,
    TableConfig,
    merge_gradients,
    set_merge,
)
from recstore_ops.ops import collecting
from recstore_ops.sparse import KeyedJaggedTensor

pytestmark = pytest.mark.tier("test")

ops = torch.ops.recstore

DIM, SPAN, BAGS = 5, 40, 30
OPTIONS: dict[str, Any] = {
    "optimizer": {"kind": "adagrad", "lr": 0.1},
    "initializer": {"kind": "constant", "value": 0.5},  # Not drawn from the name, so that pairs agree.
}
SEVERAL_DIMS = [("user", 3, ["a", "c"]), ("item", DIM, ["b"])]
EQUAL_DIMS = [("user", DIM, ["a", "b"]), ("item", DIM, ["c"])]


@pytest.fixture(autouse=True)
def _native_merge() -> Iterator[None]:
    kind = collecting._merge_kind
    set_merge("native")
    yield
    set_merge(kind)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_ids(seed: int, *shape: int) -> Tensor:
    """Ids with many duplicates."""
    return torch.randint(-SPAN, SPAN, shape, generator=random(seed))


def random_rows(seed: int, *shape: int) -> Tensor:
    """Numbers of very different size, so that the order of a sum shows."""
    exponents = torch.randint(-12, 12, shape, generator=random(seed + 1))
    return torch.randn(shape, generator=random(seed)) * 2.0**exponents


def random_lengths(seed: int, bags: int) -> Tensor:
    return torch.randint(0, 4, (bags,), generator=random(seed))  # A quarter of the bags is empty.


class Lookup:
    """A module, and batches for it by number."""

    def __init__(
        self, module: nn.Module, batch: Callable[[int], dict[str, Tensor]], call: Callable[..., Tensor]
    ) -> None:
        self.module, self.batch, self._call = module, batch, call

    def backward(self, number: int, call: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
        """One forward and backward; returns the batch, and the gradients as `gradients`."""
        batch = self.batch(number)
        out = (call or self.run)(batch)
        gradients = random_rows(number, *out.shape)
        out.backward(gradients)
        return {**batch, "gradients": gradients}

    def step(self) -> None:
        SparseOptimizer(modules=[self.module]).step()

    def run(self, batch: dict[str, Tensor]) -> Tensor:
        return self._call(self.module, batch)

    def tables(self) -> list[Table]:
        tables = [getattr(module, "table", None) for module in self.module.modules()]
        return [table for table in tables if isinstance(table, Table)]

    def rows(self) -> list[Tensor]:
        """The rows of all tables, those never written too."""
        return [ops.emb_read.table(table.handle, torch.arange(-SPAN, SPAN), table.dim) for table in self.tables()]

    def write_some_rows(self) -> Lookup:
        ids = torch.arange(-SPAN, SPAN, 3)
        for table in self.tables():
            ops.emb_write.table(table.handle, ids, torch.randn(len(ids), table.dim, generator=random(0)))
        return self


def rows_of(name: str, padding_idx: int | None = None) -> Lookup:
    module = DistEmbedding(None, DIM, name, padding_idx=padding_idx, **OPTIONS)
    return Lookup(module, lambda number: {"ids": random_ids(number, 20, 3)}, lambda module, batch: module(batch["ids"]))


def bags_of(
    name: str, mode: Literal["sum", "mean", "max"] = "sum", weighted: bool = False, padding_idx: int | None = None
) -> Lookup:
    module = DistEmbeddingBag(None, DIM, name, mode, padding_idx, include_last_offset=True, **OPTIONS)

    def batch(number: int) -> dict[str, Tensor]:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), random_lengths(number, BAGS).cumsum(0)])
        ids = random_ids(number, int(offsets[-1]))
        weights = {"weights": random_rows(number + 7, len(ids))} if weighted else {}
        return {"ids": ids, "offsets": offsets, **weights}

    return Lookup(module, batch, lambda module, batch: module(batch["ids"], batch["offsets"], batch.get("weights")))


def features_of(name: str, tables: list[tuple[str, int, list[str]]] = EQUAL_DIMS, weighted: bool = False) -> Lookup:
    configs = [
        {"name": f"{name}/{table}", "num_embeddings": None, "embedding_dim": dim, "feature_names": features}
        for table, dim, features in tables
    ]
    options = {key: OPTIONS[key] for key in ("optimizer", "initializer")}
    module = RecStoreEmbeddingBagCollection(configs, keyed_output=True, **options)

    def batch(number: int) -> dict[str, Tensor]:
        lengths = random_lengths(number, 3 * BAGS)
        ids = random_ids(number, int(lengths.sum()))
        weights = {"weights": random_rows(number + 7, len(ids))} if weighted else {}
        return {"ids": ids, "lengths": lengths, **weights}

    def call(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        keys, weights = ["a", "b", "c"], batch.get("weights")
        return module(KeyedJaggedTensor(keys, batch["ids"], weights, lengths=batch["lengths"])).values()

    return Lookup(module, batch, call)


LOOKUPS: dict[str, Callable[[str], Lookup]] = {
    "rows": rows_of,
    "rows, padding": lambda name: rows_of(name, padding_idx=3),
    "sum": bags_of,
    "sum, padding": lambda name: bags_of(name, padding_idx=3),
    "sum, weights": lambda name: bags_of(name, weighted=True),
    "sum, weights, padding": lambda name: bags_of(name, weighted=True, padding_idx=3),
    "mean": lambda name: bags_of(name, "mean"),
    "mean, padding": lambda name: bags_of(name, "mean", padding_idx=3),
    "max": lambda name: bags_of(name, "max"),
    "max, padding": lambda name: bags_of(name, "max", padding_idx=3),
    "features": features_of,
    "features, weights": lambda name: features_of(name, weighted=True),
    "features of several dims": lambda name: features_of(name, SEVERAL_DIMS),
    "features of several dims, weights": lambda name: features_of(name, SEVERAL_DIMS, weighted=True),
}

KEPT = [
    ("rows", "gradients"),
    ("rows", "ids"),
    ("sum", "gradients"),
    ("sum", "ids"),
    ("mean", "ids"),
    ("max", "ids"),
    ("sum, weights", "weights"),
    ("features, weights", "gradients"),
    ("features, weights", "ids"),
    ("features, weights", "weights"),
]


def assert_equal_rows(one: Lookup, other: Lookup) -> None:
    for rows, expected in zip(one.rows(), other.rows(), strict=True):
        assert torch.equal(rows, expected)


@pytest.mark.parametrize(("kind", "what"), KEPT)
def test_a_change_in_place_before_the_step_is_refused_and_changes_nothing(
    kind: str, what: str, table_name: Callable[[], str]
) -> None:
    name = table_name()
    lookup, untouched = LOOKUPS[kind](name), LOOKUPS[kind](table_name())
    optimizer = SparseOptimizer(modules=[lookup.module])
    lookup.backward(1)[what].mul_(2)

    for refused in (optimizer.step, lambda: lookup.module._trace, optimizer.step):
        with pytest.raises(RuntimeError, match="changed in place") as caught:
            refused()
        assert f'table "{name}' in str(caught.value)

    assert_equal_rows(lookup, untouched)
    assert all(len(table) == table.statistics()["step"] == 0 for table in lookup.tables())


@pytest.mark.parametrize("forget", ["zero_grad", "reset_trace", "clear_collected"])
def test_training_goes_on_once_changed_gradients_are_forgotten(forget: str, table_name: Callable[[], str]) -> None:
    lookup, untouched = rows_of(table_name()), rows_of(table_name())
    optimizer = SparseOptimizer(modules=[lookup.module])
    lookup.backward(1)["gradients"].mul_(2)
    owner: Any = {"zero_grad": optimizer, "reset_trace": lookup.module, "clear_collected": lookup.tables()[0]}[forget]

    getattr(owner, forget)()

    for one in (lookup, untouched):
        one.backward(2)
        one.step()
    assert_equal_rows(lookup, untouched)


@pytest.mark.parametrize("kind", ["rows", "sum, weights", "features, weights"])
def test_changes_after_the_step_are_harmless(kind: str, table_name: Callable[[], str]) -> None:
    lookup, untouched = LOOKUPS[kind](table_name()), LOOKUPS[kind](table_name())
    for number in range(3):
        for one in (lookup, untouched):
            kept = one.backward(number)
            one.step()
            if one is lookup:
                for tensor in kept.values():
                    tensor.mul_(2)
    assert lookup.module._trace == []
    assert_equal_rows(lookup, untouched)


def test_a_change_of_what_backward_copied_is_harmless(table_name: Callable[[], str]) -> None:
    lookup, untouched = rows_of(table_name()), rows_of(table_name())
    for one in (lookup, untouched):
        ids, gradients = random_ids(1, 9).to(torch.int32), random_rows(1, DIM, 9)
        one.module(ids).backward(gradients.t())  # Neither int64 nor contiguous.
        if one is lookup:
            ids.zero_()
            gradients.zero_()
        one.step()
    assert_equal_rows(lookup, untouched)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("aot_eager", "rows"),
        ("aot_eager", "sum, weights"),
        ("aot_eager", "features, weights"),
        pytest.param("inductor", "rows", marks=pytest.mark.tier("all")),
        pytest.param("inductor", "sum, weights", marks=pytest.mark.tier("all")),
        ("inductor", "features, weights"),
    ],
)
def test_a_compiled_module_copies_and_trains_as_an_eager_one(
    backend: str, kind: str, table_name: Callable[[], str]
) -> None:
    compiled, eager = LOOKUPS[kind](table_name()), LOOKUPS[kind](table_name())
    call = torch.compile(compiled.run, backend=backend, fullgraph=True, dynamic=True)
    for number in range(2):
        for tensor in compiled.backward(number, call).values():
            tensor.mul_(2)
        eager.backward(number)
        for one in (compiled, eager):
            one.step()
    assert_equal_rows(compiled, eager)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3)])
def test_places_are_a_word_for_each_id_and_two_for_their_tag(
    shape: tuple[int, ...], table_name: Callable[[], str]
) -> None:
    table = Table(table_name(), DIM)
    ids = random_ids(1, *shape)

    rows, places = ops.emb_read.places(table.handle, ids, DIM)

    assert torch.equal(rows, ops.emb_read.table(table.handle, ids, DIM))
    assert (places.dtype, places.shape) == (torch.int32, (ids.numel() + 2,))


def open_table(name: str) -> Table:
    return Table(name, DIM, TableConfig(**OPTIONS))


def take_step(table: Table, chunks: list[tuple[Tensor, Tensor, Tensor | None]], keep: bool = True) -> None:
    """One step with ids, gradients and places."""
    for ids, gradients, places in chunks:
        ops.accept_grad(table.collector, table.handle, ids, gradients, None, places, keep)
    ops.apply_grads([table.collector])


def all_rows(table: Table) -> Tensor:
    return ops.emb_read.table(table.handle, torch.arange(-SPAN, SPAN), DIM)


def insert(table: Table, ids: Tensor) -> None:
    ops.emb_write.table(table.handle, ids, ids.unsqueeze(1).expand(-1, DIM).float())


def refill(table: Table) -> Table:
    """All rows again, in other places."""
    ids = torch.arange(-SPAN, SPAN, 2)
    ops.hashtable_delete(table.handle, ids)
    insert(table, ids.flip(0))
    return table


def recreate(table: Table) -> Table:
    ops.drop_table(table.name)
    again = open_table(table.name)
    insert(again, torch.arange(SPAN, -SPAN, -1))
    return again


def do(work: Callable[[Table], Any]) -> Callable[[Table], Table]:
    def between(table: Table) -> Table:
        work(table)
        return table

    return between


BETWEEN: dict[str, Callable[[Table], Table]] = {
    "nothing": do(lambda table: None),
    "an insertion": do(lambda table: insert(table, torch.arange(-SPAN, SPAN))),
    "a step": do(lambda table: take_step(table, [(random_ids(5, 9), random_rows(5, 9, DIM), None)])),
    "a deletion": do(lambda table: ops.hashtable_delete(table.handle, torch.arange(-SPAN, SPAN, 6))),
    "other rows in the same places": refill,
    "a clearing": do(lambda table: ops.hashtable_clear(table.handle)),
    "another table of the name": recreate,
}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_step_with_places_equals_one_without(between: str, table_name: Callable[[], str]) -> None:
    ids, gradients = random_ids(1, 50), random_rows(1, 50, DIM)
    results = []
    for with_places in (True, False):
        table = open_table(table_name())
        insert(table, torch.arange(-SPAN, SPAN, 2))
        places = ops.emb_read.places(table.handle, ids, DIM)[1]
        table = BETWEEN[between](table)
        for _ in range(2):  # The second time no id is new.
            take_step(table, [(ids, gradients, places if with_places else None)])
        results.append((all_rows(table), len(table), table.statistics()["updates"]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def places_of_another_table(table: Table, ids: Tensor) -> Tensor:
    other = refill(open_table(f"{table.name}/other"))
    return ops.emb_read.places(other.handle, ids, DIM)[1]


OTHER_PLACES: dict[str, Callable[[Table, Tensor], Tensor]] = {
    "of other ids": lambda table, ids: ops.emb_read.places(table.handle, ids + 1, DIM)[1],
    "of the ids in another order": lambda table, ids: ops.emb_read.places(table.handle, ids.flip(0), DIM)[1],
    "of another table": places_of_another_table,
    "of many of the ids": lambda table, ids: ops.emb_read.places(table.handle, ids[:-2], DIM)[1],
    "small numbers": lambda table, ids: torch.randint(0, 9, (len(ids) + 2,), dtype=torch.int32, generator=random(0)),
    "any numbers": lambda table, ids: torch.randint(
        -(2**31), 2**31, (len(ids) + 2,), dtype=torch.int32, generator=random(0)
    ),
    "none": lambda table, ids: torch.zeros(0, dtype=torch.int32),
    "one": lambda table, ids: torch.zeros(1, dtype=torch.int32),
    "no tag": lambda table, ids: ops.emb_read.places(table.handle, ids, DIM)[1][:-2],
    "half a tag": lambda table, ids: ops.emb_read.places(table.handle, ids, DIM)[1][:-1],
    "a word too many": lambda table, ids: nn.functional.pad(ops.emb_read.places(table.handle, ids, DIM)[1], (0, 1)),
    "2-D": lambda table, ids: ops.emb_read.places(table.handle, ids, DIM)[1].reshape(2, -1),
    "not contiguous": lambda table, ids: ops.emb_read.places(table.handle, ids, DIM)[1].repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", OTHER_PLACES)
def test_whatever_comes_as_places_changes_no_result(kind: str, keep: bool, table_name: Callable[[], str]) -> None:
    ids, gradients = random_ids(1, 50), random_rows(1, 50, DIM)
    table, expected = open_table(table_name()), open_table(table_name())
    for one in (table, expected):
        insert(one, torch.arange(-SPAN, SPAN, 2))

    take_step(table, [(ids, gradients, OTHER_PLACES[kind](table, ids))], keep)

    take_step(expected, [(ids, gradients, None)])
    assert torch.equal(all_rows(table), all_rows(expected))
    assert len(table) == len(expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_places_of_another_type_are_refused(dtype: torch.dtype, table_name: Callable[[], str]) -> None:
    table = open_table(table_name())
    with pytest.raises(RuntimeError, match="accept_grad: places must be int32, as a lookup gave them, got"):
        ops.accept_grad(
            table.collector,
            table.handle,
            random_ids(1, 3),
            random_rows(1, 3, DIM),
            None,
            torch.zeros(5, dtype=dtype),
            True,
        )
    assert ops.collected_tables(table.collector).numel() == 0


def test_places_of_any_age_change_no_result(table_name: Callable[[], str]) -> None:
    table, expected = open_table(table_name()), open_table(table_name())
    batches = [(random_ids(number, 12), random_rows(number, 12, DIM)) for number in range(6)]
    ages: list[list[Tensor | None]] = [[None] for _ in batches]
    for number in torch.randint(0, 10**6, (300,), generator=random(0)).tolist():
        places = ages[number % len(batches)]
        places.append(ops.emb_read.places(table.handle, batches[number % len(batches)][0], DIM)[1])
        for one, knows_places in ((table, True), (expected, False)):
            if number % 5 == 0:
                ops.hashtable_delete(one.handle, random_ids(number, 9))
            elif number % 97 == 0:
                ops.hashtable_clear(one.handle)
            else:
                chosen = [
                    (batch, ages[at][number % len(ages[at])]) for at, batch in enumerate(batches) if number >> at & 1
                ]
                take_step(one, [(*batch, age if knows_places else None) for batch, age in chosen])
        assert torch.equal(all_rows(table), all_rows(expected))
    assert len(table) == len(expected)


def test_backwards_are_summed_one_by_one_and_their_sums_in_order(table_name: Callable[[], str]) -> None:
    lookup, expected = rows_of(table_name()), open_table(table_name())
    kept = [lookup.backward(number) for number in range(4)]
    merged = [merge_gradients(batch["ids"].flatten(), batch["gradients"].flatten(0, 1)) for batch in kept]
    ids, sums = merge_gradients(torch.cat([ids for ids, _ in merged]), torch.cat([sums for _, sums in merged]))

    ((_, traced_ids, traced_sums),) = lookup.tables()[0].collected()
    lookup.step()
    ops.emb_update.table(expected.handle, ids, sums)

    assert torch.equal(traced_ids, ids)
    assert torch.equal(traced_sums, sums)
    assert torch.equal(lookup.rows()[0], all_rows(expected))
    assert lookup.tables()[0].statistics()["updates"] == len(ids)


@pytest.mark.parametrize("kind", LOOKUPS)
@pytest.mark.parametrize("backwards", [1, 3])
def test_either_merge_gives_the_same_rows(backwards: int, kind: str, table_name: Callable[[], str]) -> None:
    native, python = (LOOKUPS[kind](table_name()).write_some_rows() for _ in range(2))
    for step in range(3):
        for lookup, merge in ((native, "native"), (python, "python")):
            set_merge(merge)  # type: ignore[arg-type]
            for number in range(backwards):
                lookup.backward(10 * step + number)
            lookup.step()
    assert_equal_rows(native, python)
    assert [len(table) for table in native.tables()] == [len(table) for table in python.tables()]


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class BagGradients:
    """Valid arguments of `accept_bag_grads`: two tables, two bags of each, of four ids."""

    def __init__(self, table: Table) -> None:
        self.collectors, self.tables, self.dims = [table.collector] * 2, [table.handle] * 2, [DIM] * 2
        self.ids, self.offsets, self.grads = longs(1, 2, 3, 4), longs(0, 1, 1, 3, 4), torch.ones(2, 2 * DIM)
        self.weights: Tensor | None = None
        self.places: Tensor | None = None

    def accept(self, **changes: Any) -> None:
        vars(self).update(changes)
        ops.accept_bag_grads(
            self.collectors,
            self.tables,
            self.ids,
            self.offsets,
            self.grads,
            self.dims,
            self.weights,
            None,
            self.places,
            True,
        )


NUMBERS = "accept_bag_grads: 2 tables need as many collectors, dims and bags each, got "
SHAPE = "accept_bag_grads: 2 bags of 2 tables of dims together 10 need gradients of that shape, got "

REFUSED: dict[str, tuple[Callable[[Table], dict[str, Any]], str]] = {
    "collectors": (lambda t: {"collectors": [t.collector]}, NUMBERS + "1 collectors, 2 dims and 4 bags"),
    "dims": (lambda t: {"dims": [DIM]}, NUMBERS + "2 collectors, 1 dims and 4 bags"),
    "bags": (lambda t: {"offsets": longs(0, 1, 3, 4)}, NUMBERS + "2 collectors, 2 dims and 3 bags"),
    "no tables": (lambda t: {"tables": [], "collectors": [], "dims": []}, "accept_bag_grads: 0 tables need"),
    "another dim": (lambda t: {"dims": [DIM, 4]}, "has dim 5, got gradient rows of 4"),
    "a bag too few": (lambda t: {"grads": torch.ones(1, 2 * DIM)}, SHAPE + "[1, 10]"),
    "a column too few": (lambda t: {"grads": torch.ones(2, 9)}, SHAPE + "[2, 9]"),
    "no matrix": (lambda t: {"grads": torch.ones(20)}, SHAPE + "[20]"),
    "whole numbers": (lambda t: {"grads": torch.ones(2, 10).long()}, "gradients must be floating point, got Long"),
    "no offsets": (lambda t: {"offsets": longs()}, "offsets must hold at least the end of the last bag, got none"),
    "a late first offset": (lambda t: {"offsets": longs(1, 1, 1, 3, 4)}, "offsets must start at 0, got 1"),
    "a late last offset": (lambda t: {"offsets": longs(0, 1, 1, 3, 5)}, "offsets must end at the 4 ids, got 5"),
    "falling offsets": (
        lambda t: {"offsets": longs(0, 3, 1, 3, 4)},
        "offsets must not fall, got 1 after 3 at position 2",
    ),
    "weights": (lambda t: {"weights": torch.ones(3)}, "expected 4 per_sample_weights, one an id, got 3"),
    "places": (lambda t: {"places": torch.zeros(8)}, "accept_bag_grads: places must be int32, as a lookup gave them"),
    "an unknown collector": (
        lambda t: {"collectors": [t.collector, longs(10**9)[0]]},
        "collector handle 1000000000 is unknown, released or of another process",
    ),
    "an unknown table": (
        lambda t: {"tables": [t.handle, torch.zeros_like(t.handle)]},
        "accept_bag_grads: table must be a handle as make_hashtable gives it, got other numbers of its shape",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_wrong_arguments_of_accept_bag_grads_are_refused_with_what_came(
    kind: str, table_name: Callable[[], str]
) -> None:
    table = open_table(table_name())
    change, words = REFUSED[kind]
    with pytest.raises(RuntimeError, match=re.escape(words)):
        BagGradients(table).accept(**change(table))
    assert ops.collected_tables(table.collector).numel() == 0


def test_accept_bag_grads_gives_each_id_the_gradient_of_its_bag(table_name: Callable[[], str]) -> None:
    table = open_table(table_name())
    grads = torch.arange(2.0 * 2 * DIM).reshape(2, 2 * DIM)

    BagGradients(table).accept(ids=longs(1, 1, 3, 3), grads=grads, weights=torch.tensor([1.0, 2.0, 3.0, 4.0]))

    # Bags of the first table: [1], []; of the second: [1, 3], [3].
    ((_, ids, sums),) = table.collected()
    assert ids.tolist() == [1, 3]
    assert torch.equal(sums[0], grads[0, :DIM] + 2 * grads[0, DIM:])
    assert torch.equal(sums[1], 3 * grads[0, DIM:] + 4 * grads[1, DIM:])


REPLACED: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "gradients of 16 bits": ("gradients", lambda tensor: setattr(tensor, "data", tensor.data.half())),
    "gradients without memory of their own": (
        "gradients",
        lambda tensor: setattr(tensor, "data", torch.ones(1).expand(tensor.shape)),
    ),
    "fewer gradients": ("gradients", lambda tensor: setattr(tensor, "data", tensor.data[:1].clone())),
    "ids of 32 bits": ("ids", lambda tensor: setattr(tensor, "data", tensor.data.int())),
    "fewer ids": ("ids", lambda tensor: setattr(tensor, "data", tensor.data[:1].clone())),
    "no memory": ("gradients", lambda tensor: tensor.untyped_storage().resize_(0)),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_kept_tensors_whose_memory_was_replaced_are_refused(kind: str, table_name: Callable[[], str]) -> None:
    lookup, untouched = rows_of(table_name()), rows_of(table_name())
    what, replace = REPLACED[kind]
    replace(lookup.backward(1)[what])

    with pytest.raises(RuntimeError, match="changed in place"):
        lookup.step()

    assert_equal_rows(lookup, untouched)


@pytest.mark.parametrize("kind", ["rows, padding", "sum, padding", "max, padding"])
def test_a_gradient_of_padding_that_is_not_finite_does_not_count(kind: str, table_name: Callable[[], str]) -> None:
    lookup, expected = LOOKUPS[kind](table_name()), LOOKUPS[kind](table_name())
    ids = torch.tensor([1, 3, 3])  # 3 is padding.
    batch = {"ids": ids, "offsets": torch.arange(4)}
    for one, of_padding in ((lookup, float("nan")), (expected, 0.0)):
        one.run(batch).backward(torch.tensor([1.0, of_padding, -of_padding]).unsqueeze(1).expand(-1, DIM))
        one.step()
    assert_equal_rows(lookup, expected)
