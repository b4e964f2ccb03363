"""The raw operators: schemas, shapes, dtypes and strides, and what `torch.library.opcheck` asks of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import recstore_ops
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("quick")

ops = torch.ops.recstore

EAGER_ONLY = {
    "make_hashtable",
    "hashtable_release",
    "drop_table",
    "init_embedding_table",
    "emb_prefetch",
    "emb_prefetch.table",
    "emb_prefetch.tables",
    "emb_wait_result",
    "emb_wait_tables",
    "rank_requests",
    "emb_read.ranks",
    "pool_rank_rows",
    "spread_rank_grads",
    "accept_rank_grads",
    "hashtable_ids",
    "hashtable_size",
    "hashtable_slot",
    "make_collector",
    "collector_release",
    "collected_tables",
    "collected_grads",
    "_panic",
}

DIM = 3
IDS = torch.tensor([4, -2, 4, 2**62])
ROWS = torch.arange(12.0).reshape(4, DIM)
OFFSETS = torch.tensor([0, 1, 1, 4])
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])
CHARACTERS = torch.tensor([66, 101, 114, 110], dtype=torch.uint8)
OF_REAL_VALUES = {"emb_read", "emb_write", "emb_update", "unique", "merge_gradients"}
"""The operators of the default table, and those whose results have a size that only values tell."""
MAKERS_OF_IDS = {"hash_strings", "cross_ids", "ngram_ids", "prefix_ids", "bucket_ids"}


@pytest.fixture
def table(table_name: Callable[[], str]) -> Tensor:
    return ops.make_hashtable(table_name(), DIM)


@pytest.fixture
def collector() -> Tensor:
    return ops.make_collector()


def arguments(table: Tensor, other: Tensor, collector: Tensor) -> dict[str, list[tuple[Any, ...]]]:
    """Sample arguments of every operator that can be traced."""
    tables = [table, other]
    return {
        "emb_read": [(IDS, DIM), (IDS[:0], DIM), (IDS.reshape(2, 2), DIM)],
        "emb_read.table": [(table, IDS, DIM), (table, IDS[::2], DIM), (table, IDS[0], DIM)],
        "emb_read.places": [(table, IDS, DIM), (table, IDS[:0], DIM), (table, IDS[0], DIM)],
        "emb_write": [(IDS, ROWS)],
        "emb_write.table": [(table, IDS, ROWS), (table, IDS[:0], ROWS[:0])],
        "emb_update": [(IDS, ROWS)],
        "emb_update.table": [(table, IDS, ROWS)],
        "emb_bag": [
            (table, IDS, OFFSETS, DIM, operators.SUM, WEIGHTS),
            (table, IDS, OFFSETS, DIM, operators.MEAN, None, 4),
            (table, IDS, OFFSETS, DIM, operators.MAX),
        ],
        "emb_bag.tables": [
            (tables, IDS, torch.tensor([0, 1, 2, 3, 4]), [DIM, DIM], operators.SUM, WEIGHTS),
            (tables, IDS, torch.tensor([0, 1, 2, 3, 4]), [DIM, DIM], operators.MAX),
        ],
        "emb_bag.places": [
            (tables, IDS, torch.tensor([0, 1, 2, 3, 4]), [DIM, DIM], operators.SUM, WEIGHTS),
            ([table], IDS, OFFSETS, [DIM], operators.MEAN, None, 4),
            ([table], IDS, OFFSETS, [DIM], operators.MAX),
        ],
        "hashtable_lookup": [(table, IDS, DIM, False), (table, IDS, DIM, True)],
        "hashtable_delete": [(table, IDS)],
        "hashtable_clear": [(table,)],
        "set_learning_rate": [(table, 0.5)],
        "accept_grad": [
            (collector, table, IDS, ROWS),
            (collector, table, IDS, ROWS, 4),
            (collector, table, IDS, ROWS, None, ops.emb_read.places(table, IDS, DIM)[1], True),
        ],
        "accept_bag_grads": [
            ([collector, collector], tables, IDS, torch.tensor([0, 1, 2, 3, 4]), torch.ones(2, 2 * DIM), [DIM, DIM]),
            ([collector], [table], IDS, OFFSETS, torch.ones(3, DIM), [DIM], WEIGHTS, 4, None, True),
        ],
        "apply_grads": [([collector],)],
        "clear_grads": [(collector,)],
        "unique": [(IDS,), (IDS.reshape(2, 2),)],
        "merge_gradients": [(IDS, ROWS)],
        "hash_strings": [(CHARACTERS, OFFSETS), (CHARACTERS, OFFSETS.int(), 7), (CHARACTERS[:0], OFFSETS[:1])],
        "cross_ids": [([IDS],), ([IDS, IDS.flip(0), IDS], 3), ([IDS.reshape(2, 2), IDS.reshape(2, 2).T],)],
        "ngram_ids": [(IDS, 2, 3, 10), (IDS.reshape(2, 2), 3, 1, 5, 9), (IDS[:0], 1, 2, 4)],
        "prefix_ids": [(torch.tensor([[1, 0], [2, 3]]), [3, 4]), (torch.zeros(0, 2, dtype=torch.int32), [3, 4])],
        "bucket_ids": [(IDS, 10), (IDS.reshape(2, 2), 5, 3), (IDS[0], 1)],
    }


def overload(name: str) -> Any:
    packet, _, overload_name = name.partition(".")
    return getattr(getattr(ops, packet), overload_name or "default")


def all_overloads() -> set[str]:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("recstore::")]
    return {
        schema.name.removeprefix("recstore::") + (f".{schema.overload_name}" if schema.overload_name else "")
        for schema in schemas
    }


def test_every_operator_is_either_checked_or_eager_only(table: Tensor, collector: Tensor) -> None:
    assert set(arguments(table, table, collector)) | EAGER_ONLY == all_overloads()


@pytest.mark.parametrize("name", sorted(all_overloads() - EAGER_ONLY))
def test_opcheck_passes(name: str, table: Tensor, collector: Tensor, table_name: Callable[[], str]) -> None:
    other = ops.make_hashtable(table_name(), DIM)
    for args in arguments(table, other, collector)[name]:
        torch.library.opcheck(overload(name), args)


def each_on_meta(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments with one tensor moved to the meta device, once for each."""
    flat, structure = tree_flatten(args)
    tensors = [place for place, value in enumerate(flat) if isinstance(value, Tensor)]

    def moved(place: int) -> tuple[Any, ...]:
        return tree_unflatten([*flat[:place], flat[place].to("meta"), *flat[place + 1 :]], structure)

    return [moved(place) for place in tensors]


def all_on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args)


@pytest.mark.parametrize("name", sorted(all_overloads() - EAGER_ONLY))
def test_one_meta_tensor_among_others_is_refused(
    name: str, table: Tensor, collector: Tensor, table_name: Callable[[], str]
) -> None:
    other = ops.make_hashtable(table_name(), DIM)
    words = rf"^{name.partition('.')[0]}: got a meta tensor, which has no values, (for a table|beside one) that has$"
    for args in arguments(table, other, collector)[name]:
        for mixed in each_on_meta(args):
            if any(isinstance(value, Tensor) and not value.is_meta for value in tree_leaves(mixed)):
                with pytest.raises(RuntimeError, match=words):
                    overload(name)(*mixed)


@pytest.mark.parametrize("name", sorted(all_overloads() - EAGER_ONLY - OF_REAL_VALUES))
def test_meta_tensors_alone_give_meta_tensors(
    name: str, table: Tensor, collector: Tensor, table_name: Callable[[], str]
) -> None:
    other = ops.make_hashtable(table_name(), DIM)
    for args in arguments(table, other, collector)[name]:
        expected, found = (
            [result for result in tree_leaves(overload(name)(*given)) if result is not None]
            for given in (args, all_on_meta(args))
        )
        assert [each.shape for each in found] == [each.shape for each in expected]
        assert all(each.is_meta for each in found)


def test_every_stateful_operator_has_an_ordered_effect() -> None:
    pure = {"unique", "merge_gradients", *MAKERS_OF_IDS}
    stateful = {f"recstore::{name}" for name in all_overloads() - EAGER_ONLY - pure}
    assert set(operators.EFFECTFUL) == stateful


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3), (2, 2, 2)])
def test_rows_have_the_shape_of_the_ids_and_dim(shape: tuple[int, ...], table: Tensor) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    assert ops.emb_read(table, ids, DIM).shape == (*shape, DIM)
    assert ops.emb_read(ids, 5).shape == (*shape, 5)


def test_strided_ids_and_rows_are_read_by_position(table: Tensor) -> None:
    ids = torch.arange(8)
    rows = torch.arange(24.0).reshape(DIM, 8).t()
    ops.emb_write(table, ids, rows)
    assert torch.equal(ops.emb_read(table, ids[::2], DIM), rows[::2])
    transposed = ids.reshape(2, 4).t()
    assert torch.equal(ops.emb_read(table, transposed, DIM), rows[transposed])
    assert torch.equal(ops.emb_read(table, torch.tensor(3).expand(4), DIM), rows[3].expand(4, DIM))


def test_uint64_ids_are_taken_as_their_int64_bits(table: Tensor) -> None:
    ops.emb_write(table, torch.tensor([-1, 2**63 - 1]), ROWS[:2])
    ids = torch.tensor([2**64 - 1, 2**63 - 1], dtype=torch.uint64)
    assert torch.equal(ops.emb_read(table, ids, DIM), ROWS[:2])


def test_the_last_duplicate_of_a_write_wins(table: Tensor) -> None:
    ops.emb_write(table, torch.tensor([9, 9]), ROWS[:2])
    assert torch.equal(ops.emb_read(table, torch.tensor(9), DIM), ROWS[1])


def test_the_default_table_appears_with_its_first_write() -> None:
    dim = 11
    ids = torch.tensor([5])
    assert ops.emb_read(ids, dim).eq(0).all()
    assert f"default/{dim}" not in recstore_ops.table_names()
    ops.emb_update(ids, torch.ones(1, dim))
    assert torch.allclose(ops.emb_read(ids, dim), torch.full((1, dim), -0.01))
    assert recstore_ops.table_statistics(f"default/{dim}")["rows"] == 1


def test_one_handle_stands_for_one_table(table_name: Callable[[], str]) -> None:
    name = table_name()
    first, second = ops.make_hashtable(name, DIM), ops.make_hashtable(name, DIM)
    assert torch.equal(first, second)
    assert (first.dtype, first.dim(), first.device.type) == (torch.int64, 1, "cpu")


def test_a_released_handle_is_not_reused_and_rows_stay(table_name: Callable[[], str]) -> None:
    name = table_name()
    handle = ops.make_hashtable(name, DIM)
    ops.emb_write(handle, IDS[:1], ROWS[:1])
    ops.hashtable_release(handle)
    again = ops.make_hashtable(name, DIM)
    assert not torch.equal(again, handle)
    assert torch.equal(ops.emb_read(again, IDS[:1], DIM), ROWS[:1])


def test_init_embedding_table_opens_a_bounded_table(table_name: Callable[[], str]) -> None:
    name = table_name()
    assert ops.init_embedding_table(name, 10, DIM, '{"optimizer": {"kind": "adam"}}')
    assert ops.init_embedding_table(name, 10, DIM, '{"optimizer": {"kind": "adam"}}')
    with pytest.raises(RuntimeError, match="exists with"):
        ops.init_embedding_table(name, 11, DIM, '{"optimizer": {"kind": "adam"}}')
    with pytest.raises(RuntimeError, match="num_embeddings is 10, but the configuration says 9"):
        ops.init_embedding_table(table_name(), 10, DIM, '{"num_embeddings": 9}')


@pytest.mark.parametrize(("mode", "name"), [(0, "sum"), (1, "mean"), (2, "max")])
def test_bags_of_several_tables_equal_each_table_alone(mode: int, name: str, table_name: Callable[[], str]) -> None:
    dims = [2, 5]
    handles = [ops.make_hashtable(table_name(), dim) for dim in dims]
    ids = torch.randint(-5, 5, (9,))
    offsets = torch.tensor([0, 2, 2, 5, 5, 8, 9])
    pooled, positions = ops.emb_bag(handles, ids, offsets, dims, mode)
    first, first_at = ops.emb_bag(handles[0], ids[:5], offsets[:4], dims[0], mode)
    second, second_at = ops.emb_bag(handles[1], ids[5:], offsets[3:] - 5, dims[1], mode)
    assert torch.equal(pooled, torch.cat([first, second], dim=1))
    if name == "max":
        moved = torch.where(second_at >= 0, second_at + 5, second_at)
        assert torch.equal(positions, torch.cat([first_at, moved], dim=1))


def test_meta_tensors_give_shapes_without_a_store() -> None:
    handle = torch.empty((), dtype=torch.int64, device="meta")
    ids = torch.empty((4, 2), dtype=torch.int64, device="meta")
    rows = ops.emb_read(handle, ids, 6)
    assert (rows.shape, rows.dtype, rows.device.type) == ((4, 2, 6), torch.float32, "meta")


def test_unique_is_torch_unique() -> None:
    ids = torch.tensor([[3, -1, 3], [2**63 - 1, -(2**63), 0]])
    for ours, theirs in zip(ops.unique(ids), torch.unique(ids, return_inverse=True), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_results_are_on_the_device_of_the_ids(table: Tensor, collector: Tensor) -> None:
    ids, rows = IDS.cuda(), ROWS.cuda()
    ops.emb_write(table, ids, rows)
    ops.emb_update(table, ids, rows)
    ops.accept_grad(collector, table, ids, rows)
    for result in [
        ops.emb_read(table, ids, DIM),
        ops.emb_read(table, ids[:0], DIM),
        *ops.emb_bag(table, ids, OFFSETS.cuda(), DIM, operators.MAX),
        *ops.hashtable_lookup(table, ids, DIM, False),
        *ops.merge_gradients(ids, rows),
        *ops.unique(ids),
        ops.hash_strings(CHARACTERS.cuda(), OFFSETS.cuda()),
        ops.cross_ids([ids, ids]),
        ops.ngram_ids(ids, 2, 2, 10),
        ops.prefix_ids(ids.clamp(0, 1), [2, 2, 2, 2]),
        ops.bucket_ids(ids, 10),
    ]:
        assert result.is_cuda
