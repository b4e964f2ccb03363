"""Ids and gradients whose memory numpy has too, and which it fills anew: as with `nn.Embedding`, or better."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    embedding,
    embedding_bag,
    set_merge,
)

pytestmark = pytest.mark.tier("quick")

SGD: dict[str, Any] = {"initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1.0}}
ALL_IDS = torch.arange(10)


class Lookup(NamedTuple):
    """A module, the rows or sums of two ids, one of each bag, and the rows of all ids."""

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    rows: Callable[[], Tensor]


def of_embedding(name: str) -> Lookup:
    module = DistEmbedding(None, 1, name, **SGD)
    return Lookup(module, module, lambda: module.weight[ALL_IDS])


def of_function(name: str) -> Lookup:
    module = DistEmbedding(None, 1, name, **SGD)
    return Lookup(module, lambda ids: embedding(ids, module.table), lambda: module.weight[ALL_IDS])


def of_bag(mode: str) -> Callable[[str], Lookup]:
    def make(name: str) -> Lookup:
        module: Any = DistEmbeddingBag(None, 1, name, mode=mode, **SGD)  # type: ignore[arg-type]
        return Lookup(module, lambda ids: module(ids, torch.tensor([0, 1])), lambda: module.weight[ALL_IDS])

    return make


def of_equal_bags(name: str) -> Lookup:
    module = DistEmbeddingBag(None, 1, name, **SGD)
    return Lookup(module, lambda ids: module(ids[:, None]), lambda: module.weight[ALL_IDS])


def of_bag_function(name: str) -> Lookup:
    module = DistEmbeddingBag(None, 1, name, **SGD)
    forward = lambda ids: embedding_bag(ids, module.table, torch.tensor([0, 1, 2]), include_last_offset=True)  # noqa: E731
    return Lookup(module, forward, lambda: module.weight[ALL_IDS])


def of_hash_table(name: str) -> Lookup:
    module = HashTable([1], name, **SGD)
    return Lookup(module, module, lambda: module.slot("embedding", ALL_IDS))


def batch(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([1, 1]))


def of_bag_collection(fused: bool, prefetched: bool = False) -> Callable[[str], Lookup]:
    def make(name: str) -> Lookup:
        config = {"name": name, "num_embeddings": None, "embedding_dim": 1, "feature_names": ["a", "b"]}
        module = RecStoreEmbeddingBagCollection([config], enable_fusion=fused, **SGD)

        def forward(ids: Tensor) -> Tensor:
            if prefetched:
                module.issue_fused_prefetch(batch(ids))
            return module(batch(ids)).view(2, 1)

        return Lookup(module, forward, lambda: module.embedding_bags[name].weight[ALL_IDS])

    return make


def of_collection(name: str) -> Lookup:
    config = {"name": name, "num_embeddings": None, "embedding_dim": 1, "feature_names": ["a", "b"]}
    module = RecStoreEmbeddingCollection([config], **SGD)

    def forward(ids: Tensor) -> Tensor:
        rows = module(batch(ids))
        return torch.cat([rows["a"].values(), rows["b"].values()])

    return Lookup(module, forward, lambda: module.embeddings[name].weight[ALL_IDS])


LOOKUPS: dict[str, Callable[[str], Lookup]] = {
    "DistEmbedding": of_embedding,
    "embedding": of_function,
    **{f"DistEmbeddingBag, {mode}": of_bag(mode) for mode in ("sum", "mean", "max")},
    "DistEmbeddingBag, 2-D": of_equal_bags,
    "embedding_bag": of_bag_function,
    "HashTable": of_hash_table,
    "RecStoreEmbeddingBagCollection": of_bag_collection(True),
    "RecStoreEmbeddingBagCollection, one by one": of_bag_collection(False),
    "RecStoreEmbeddingBagCollection, prefetched": of_bag_collection(True, prefetched=True),
    "RecStoreEmbeddingCollection": of_collection,
}


def from_numpy() -> tuple[Tensor, np.ndarray]:
    buffer = np.array([1, 2])
    return torch.from_numpy(buffer), buffer


def to_numpy() -> tuple[Tensor, np.ndarray]:
    ids = torch.tensor([1, 2])
    return ids, ids.numpy()


def by_dlpack() -> tuple[Tensor, np.ndarray]:
    buffer = np.array([1, 2])
    return torch.from_dlpack(buffer), buffer


def by_buffer() -> tuple[Tensor, np.ndarray]:
    buffer = np.array([1, 2])
    return torch.frombuffer(buffer, dtype=torch.int64), buffer


SHARED = {"from_numpy": from_numpy, "numpy()": to_numpy, "from_dlpack": by_dlpack, "frombuffer": by_buffer}


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


def stepped(lookup: Lookup) -> list[float]:
    SparseOptimizer(modules=[lookup.module]).step()
    return lookup.rows().flatten().tolist()


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("kind", LOOKUPS)
def test_two_batches_through_one_buffer_train_the_rows_of_both(kind: str, shared: str, name: str) -> None:
    lookup, (ids, buffer) = LOOKUPS[kind](name), SHARED[shared]()
    lookup.forward(ids).sum().backward()
    buffer[:] = [3, 4]
    lookup.forward(ids).sum().backward()
    buffer[:] = [8, 9]
    assert stepped(lookup) == [0, -1, -1, -1, -1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", LOOKUPS)
def test_a_buffer_filled_anew_before_backward_trains_the_rows_that_were_read(kind: str, name: str) -> None:
    lookup, (ids, buffer) = LOOKUPS[kind](name), from_numpy()
    output = lookup.forward(ids).sum()
    buffer[:] = [3, 4]
    output.backward()
    assert stepped(lookup) == [0, -1, -1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", LOOKUPS)
def test_a_gradient_that_numpy_scales_later_counts_as_it_was(kind: str, name: str) -> None:
    lookup, gradient = LOOKUPS[kind](name), np.ones((2, 1), np.float32)
    lookup.forward(torch.tensor([1, 2])).backward(torch.from_numpy(gradient))
    gradient *= 100
    assert stepped(lookup) == [0, -1, -1, 0, 0, 0, 0, 0, 0, 0]


def test_weights_that_numpy_changes_later_count_as_they_were(name: str) -> None:
    bag, weights = DistEmbeddingBag(None, 1, name, mode="sum", **SGD), np.array([2.0, 3.0], np.float32)
    bag(torch.tensor([1, 2]), torch.tensor([0]), torch.from_numpy(weights)).sum().backward()
    weights *= 100
    assert stepped(Lookup(bag, bag, lambda: bag.weight[ALL_IDS])) == [0, -2, -3, 0, 0, 0, 0, 0, 0, 0]


def test_offsets_that_numpy_changes_later_count_as_they_were(name: str) -> None:
    bag = DistEmbeddingBag(None, 1, name, mode="sum", include_last_offset=True, **SGD)
    offsets = np.array([0, 1, 2])
    output = bag(torch.tensor([1, 2]), torch.from_numpy(offsets))
    offsets[:] = [0, 0, 2]
    output.backward(torch.tensor([[1.0], [10.0]]))
    assert stepped(Lookup(bag, bag, lambda: bag.weight[ALL_IDS])) == [0, -1, -10, 0, 0, 0, 0, 0, 0, 0]


def test_two_batches_through_one_buffer_are_as_torch_s(name: str) -> None:
    ours, theirs = DistEmbedding(None, 1, name, **SGD), nn.Embedding(5, 1)
    nn.init.zeros_(theirs.weight)
    rows = []
    for module, optimizer in (
        (ours, SparseOptimizer(modules=[ours])),
        (theirs, torch.optim.SGD(theirs.parameters(), 1.0)),
    ):
        ids, buffer = from_numpy()
        module(ids).sum().backward()
        buffer[:] = [2, 4]
        module(ids).sum().backward()
        buffer[:] = 0
        optimizer.step()
        rows.append(module.weight[torch.arange(5)].detach())
    assert torch.equal(*rows)


def test_compiled_code_copies_too(name: str) -> None:
    module = DistEmbedding(None, 1, name, **SGD)
    forward = torch.compile(module, backend="aot_eager", fullgraph=True)
    ids, buffer = from_numpy()
    forward(ids).sum().backward()
    buffer[:] = [3, 4]
    forward(ids).sum().backward()
    assert stepped(Lookup(module, module, lambda: module.weight[ALL_IDS])) == [0, -1, -1, -1, -1, 0, 0, 0, 0, 0]


def test_gradients_merged_in_python_are_copies(name: str) -> None:
    lookup, (ids, buffer) = of_embedding(name), from_numpy()
    set_merge("python")
    try:
        lookup.forward(ids).sum().backward()
    finally:
        set_merge("native")
    buffer[:] = [3, 4]
    assert stepped(lookup) == [0, -1, -1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("change", ["numpy", "torch"])
def test_a_prefetch_is_not_taken_for_a_batch_filled_into_its_buffer(change: str, name: str) -> None:
    config = {"name": name, "num_embeddings": None, "embedding_dim": 1, "feature_names": ["a", "b"]}
    module = RecStoreEmbeddingBagCollection([config], **SGD)
    module.embedding_bags[name].weight[ALL_IDS] = ALL_IDS[:, None].to(torch.float32)
    ids, buffer = from_numpy()
    module.issue_fused_prefetch(batch(ids))
    if change == "numpy":
        buffer[:] = [3, 4]
    else:
        ids.copy_(torch.tensor([3, 4]))
    assert module(batch(ids)).flatten().tolist() == [3, 4]
    assert module.report_prefetch_stats()["used"] == 0


def test_changes_by_torch_are_still_refused(name: str) -> None:
    lookup, ids = of_embedding(name), torch.tensor([1, 2])
    lookup.forward(ids).sum().backward()
    ids.fill_(3)
    with pytest.raises(RuntimeError, match="in place"):
        stepped(lookup)
