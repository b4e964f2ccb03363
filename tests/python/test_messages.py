"""Messages are in the words of users: none shows how Rust writes its own values, and positions are those given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from module_kinds import KINDS
from torch import Tensor

from recstore_ops import DistEmbedding, DistEmbeddingBag, KeyedJaggedTensor, Table, TableConfig, embedding_bag

pytestmark = pytest.mark.tier("test")

ops = torch.ops.recstore
ROOT = Path(__file__).parents[2]

# What Rust writes as people do: numbers and names in brackets, names that a file says in quotes, times, and names of
# kinds without values.
LISTS = {
    "rust/recstore/src/error.rs": {"{registered:?}"},
    "rust/recstore-ps/src/workers/mod.rs": {"{missing:?}"},
    "rust/recstore-ps/src/wire/codec/section.rs": {"{names:?}"},
    "rust/recstore-ps/src/wire/codec/reply.rs": {"{kind:?}"},
    "rust/recstore-ps/src/wire/codec/request.rs": {"{kind:?}"},
    "rust/recstore-ps/src/wire/codec/management.rs": {"{self:?}"},
    "rust/recstore-ps/src/wire/codec/pieces.rs": {"{:?}", "{kind:?}"},
    "rust/recstore-ps/src/grpc/service.rs": {"{:?}", "{kind:?}"},
    "rust/recstore-tch/src/error.rs": {"{actual:?}", "{expected:?}"},
    "rust/recstore/src/checkpoint/table_file/reader.rs": {"{:?}"},
    "rust/recstore/src/rows/feature_hashing/mod.rs": {"{sizes:?}"},
    "rust/recstore/src/disk/directory/name.rs": {"{:?}"},
    "rust/recstore-runtime/src/inputs.rs": {"{shape:?}", "{:?}"},
    "rust/recstore-runtime/src/manifest.rs": {"{:?}", "{name:?}", "{shape:?}", "{sizes:?}"},
    "rust/recstore-runtime/src/operators.rs": {"{name:?}"},
    "cxx_bridge/src/kernels.rs": {"{issued:?}", "{names:?}"},
}


def debug_formats(path: Path) -> set[str]:
    """The placeholders of a file, but for its tests, that show values as Rust writes them."""
    if path.name == "tests.rs":
        return set()
    text = path.read_text().partition("#[cfg(test)]\nmod tests")[0]
    return set(re.findall(r"\{\w*:#?\?\}", text))


def test_no_message_shows_values_as_rust_writes_them() -> None:
    found = {}
    for folder in (*(ROOT / "rust").glob("*/src"), ROOT / "cxx_bridge" / "src"):
        for path in folder.rglob("*.rs"):
            if formats := debug_formats(path):
                found[str(path.relative_to(ROOT))] = formats
    assert found == LISTS


WRONG_CONFIGS = [
    '{"num_embeddings": 0}',
    '{"num_embeddings": -1}',
    '{"num_embeddings": "many"}',
    '{"memory_limit": 0}',
    '{"disk": ""}',
    '{"disk": "somewhere"}',
    '{"block_size": 0}',
    '{"seed": -1}',
    '{"dtype": "float8"}',
    '{"nan_policy": "hope"}',
    '{"initializer": {"kind": "uniform", "low": 1, "high": 0}}',
    '{"initializer": {"kind": "normal", "std": -1}}',
    '{"optimizer": {"kind": "sgd", "lr": -1}}',
    '{"optimizer": {"kind": "adam", "beta1": 2}}',
    '{"optimizer": {"kind": "ftrl", "l1": -1}}',
    '{"admission": {"kind": "count", "count": 0}}',
    '{"eviction": {"ttl": 0}}',
    '{"eviction": {"capacity": 0}}',
    '{"eviction": {}}',
    '{"num_embeddings": null, "unknown": 1}',
]


@pytest.mark.parametrize("config", WRONG_CONFIGS)
def test_a_wrong_configuration_is_refused_in_words(config: str, table_name: Callable[[], str]) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        ops.make_hashtable(table_name(), 4, config)
    assert not re.search(r"\bSome\(|\bNone\b|\bOk\(|\bErr\(", str(caught.value))


def test_a_bound_of_zero_is_named_as_given(table_name: Callable[[], str]) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"num_embeddings must be null or from 1 to \d+, got 0$"):
        ops.make_hashtable(table_name(), 4, '{"num_embeddings": 0}')


IDS = torch.tensor([1, 2, 3])

# Offsets as a caller gives them, without and with the end of the last bag, and what must be said of them.
WITHOUT_END = {
    "beyond the ids": ([0, 9], "offsets must not exceed the number of ids, 3, got 9 at position 1"),
    "beyond, then back": ([0, 9, 1], "offsets must not exceed the number of ids, 3, got 9 at position 1"),
    "a late start": ([1, 2], "offsets must start at 0, got 1"),
    "a late start beyond": ([9], "offsets must start at 0, got 9"),
    "a fall": ([0, 2, 1], "offsets must not fall, got 1 after 2 at position 2"),
    "a negative offset": ([0, -1], "offsets must not fall, got -1 after 0 at position 1"),
    "none": ([], "offsets must hold where each bag starts, got none for 3 ids"),
}
WITH_END = {
    "beyond the ids": ([0, 9, 3], "offsets must not exceed the number of ids, 3, got 9 at position 1"),
    "an end beyond": ([0, 9], "offsets must end at the 3 ids, got 9"),
    "an end too early": ([0, 2], "offsets must end at the 3 ids, got 2"),
    "a late start": ([1, 3], "offsets must start at 0, got 1"),
    "a fall": ([0, 2, 1, 3], "offsets must not fall, got 1 after 2 at position 2"),
    "none": ([], "offsets must hold at least the end of the last bag, got none"),
}


def longs(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def ways_of_bags(name: str, ends: bool, offsets: list[int]) -> dict[str, Callable[[], object]]:
    """Every lookup that takes offsets of this kind."""
    bag = DistEmbeddingBag(10, 2, name, "sum", include_last_offset=ends)
    table = bag.table
    ways: dict[str, Callable[[], object]] = {
        "module": lambda: bag(IDS, longs(offsets)),
        "module, int32": lambda: bag(IDS.int(), longs(offsets, torch.int32)),
        "weights": lambda: bag(IDS, longs(offsets), torch.ones(3)),
        "function": lambda: embedding_bag(IDS, table, longs(offsets), "mean", include_last_offset=ends),
        "weighted mean": lambda: embedding_bag(IDS, table, longs(offsets), "mean", torch.ones(3), ends),
    }
    if ends:
        ways["operator"] = lambda: ops.emb_bag(table.handle, IDS, longs(offsets), 2, 0)
        ways["operator of tables"] = lambda: ops.emb_bag([table.handle], IDS, longs(offsets), [2], 0)
    return ways


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_offsets_are_named_as_the_caller_gave_them(ends: bool, frozen: bool, table_name: Callable[[], str]) -> None:
    for offsets, words in (WITH_END if ends else WITHOUT_END).values():
        for way, call in ways_of_bags(table_name(), ends, offsets).items():
            with torch.set_grad_enabled(not frozen), pytest.raises((RuntimeError, ValueError)) as caught:
                call()
            assert words in str(caught.value), f"{way} of {offsets}: {caught.value}"


def test_no_ids_and_no_offsets_are_no_bags(table_name: Callable[[], str]) -> None:
    bag = DistEmbeddingBag(10, 2, table_name(), "sum")
    assert bag(IDS[:0], longs([])).shape == (0, 2)
    assert bag(torch.empty(2, 0, dtype=torch.int64)).eq(0).all()


@pytest.mark.parametrize("kind", [name for name in KINDS if "Collection" in name])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"offsets": [0, 9]}, "the bags must lie within the 3 values, from 0 on, got 0 to 9"),
        ({"offsets": [0, 9, 3]}, "no bag has a negative length, got -6 for bag 1"),
        ({"lengths": [4, -1]}, "no bag has a negative length, got -1 for bag 1"),
        ({"lengths": [1, 1]}, "the bags must cover the 3 values, from 0 on, got 0 to 2"),
    ],
)
def test_batches_are_named_as_the_caller_gave_them(
    kind: str, given: dict[str, list[int]], words: str, table_name: Callable[[], str]
) -> None:
    module = KINDS[kind].open(table_name())
    tensors: dict[str, Any] = {key: longs(values) for key, values in given.items()}
    with pytest.raises(ValueError, match=re.escape(words)):
        module(KeyedJaggedTensor(["seen"], IDS, **tensors))


def test_splits_and_collected_offsets_are_called_what_they_are(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 2, TableConfig())
    with pytest.raises(RuntimeError, match=r"^emb_prefetch: splits must end at the 3 ids, got 2"):
        ops.emb_prefetch([table.handle], IDS, longs([0, 2]))
    with pytest.raises(RuntimeError, match=r"^emb_prefetch: splits must not exceed the number of ids, 3, got 9 at"):
        ops.emb_prefetch([table.handle] * 2, IDS, longs([0, 9, 3]))
    with pytest.raises(RuntimeError, match=r"^accept_bag_grads: offsets must start at 0, got 1"):
        ops.accept_bag_grads([table.collector], [table.handle], IDS, longs([1, 3]), torch.ones(1, 2), [2])


def test_a_module_over_a_bound_of_zero_is_refused_in_words(table_name: Callable[[], str]) -> None:
    with pytest.raises(ValueError, match="num_embeddings") as caught:
        DistEmbedding(0, 2, table_name())
    assert "Some" not in str(caught.value)
