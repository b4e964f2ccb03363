"""Many backward passes before a step: their gradients are merged early, and nothing but memory tells.

Expected is what as many modules over one table give, each with one pass: a step takes their collectors in order, and
what is of one pass is never merged early.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from warm_programs import output_of

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    Table,
)

pytestmark = pytest.mark.tier("test")

ops = torch.ops.recstore

COUNT, DIM, PASSES = 3000, 64, 6
OPTIONS: dict[str, Any] = {
    "optimizer": {"kind": "adagrad", "lr": 0.1},
    "initializer": {"kind": "constant", "value": 0.5},  # Not drawn from the name.
}


def random(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def ids_of(number: int) -> Tensor:
    return torch.randint(0, COUNT, (COUNT,), generator=random(number))


def rows_like(number: int, outputs: Tensor) -> Tensor:
    """Numbers of very different size, so that the order of a sum shows."""
    exponents = torch.randint(-12, 12, outputs.shape, generator=random(number + 1))
    return torch.randn(outputs.shape, generator=random(number)) * 2.0**exponents


def embedding(name: str) -> Any:
    return DistEmbedding(None, DIM, name, padding_idx=3, **OPTIONS)


def bag(name: str) -> Any:
    return DistEmbeddingBag(None, DIM, name, "sum", **OPTIONS)


def collection(name: str) -> Any:
    configs = [
        {"name": f"{name}/{key}", "num_embeddings": None, "embedding_dim": dim, "feature_names": [key]}
        for key, dim in (("a", DIM), ("b", 2))
    ]
    return RecStoreEmbeddingBagCollection(configs, keyed_output=True, **OPTIONS)


def call(module: Any, number: int) -> Tensor:
    ids = ids_of(number)
    if isinstance(module, DistEmbedding):
        return module(ids)
    weights = torch.randn(ids.shape, generator=random(number + 7))
    if isinstance(module, DistEmbeddingBag):
        return module(ids, torch.arange(0, COUNT, 2), weights)
    lengths = torch.full((2 * COUNT // 4,), 2)
    return module(KeyedJaggedTensor(["a", "b"], ids, weights, lengths=lengths)).values()


def backward(module: Any, number: int) -> None:
    outputs = call(module, number)
    outputs.backward(rows_like(number, outputs))


KINDS: dict[str, Callable[[str], Any]] = {"rows": embedding, "bags": bag, "features": collection}


def rows_of(table: Table) -> Tensor:
    return ops.emb_read.table(table.handle, torch.arange(COUNT), table.dim)


@pytest.mark.parametrize("kind", KINDS)
def test_many_passes_give_the_bits_of_as_many_modules(kind: str, table_name: Callable[[], str]) -> None:
    names = table_name(), table_name()
    module, others = KINDS[kind](names[0]), [KINDS[kind](names[1]) for _ in range(PASSES)]
    for step in range(2):
        for number, other in enumerate(others):
            for each in (module, other):
                backward(each, 100 * step + number)
        SparseOptimizer(modules=[module]).step()
        SparseOptimizer(modules=others).step()
    for ours, expected in zip(module.tables(), others[0].tables(), strict=True):
        assert torch.equal(rows_of(ours), rows_of(expected))
        slots = [ops.hashtable_slot(table.handle, torch.arange(COUNT), "state_sum") for table in (ours, expected)]
        assert torch.equal(*slots)
        assert ours.statistics()["updates"] == expected.statistics()["updates"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_names_the_position_in_all_passes(kind: str, table_name: Callable[[], str]) -> None:
    names = table_name(), table_name()
    module, others = KINDS[kind](names[0]), [KINDS[kind](names[1]) for _ in range(PASSES)]
    for number, other in enumerate(others):
        for each in (module, other):
            outputs = call(each, number)
            gradients = rows_like(number, outputs)
            if number == PASSES - 2:
                gradients[77, 1] = torch.nan
            outputs.backward(gradients)
    messages = []
    for modules, name in (([module], names[0]), (others, names[1])):
        with pytest.raises(RuntimeError, match=r"gradient of id .* at position .* holds") as caught:
            SparseOptimizer(modules=modules).step()
        messages.append(str(caught.value).replace(name, "NAME"))
    assert messages[0] == messages[1]
    position = re.search(r"at position (\d+)", messages[0])
    assert position is not None
    assert int(position[1]) > COUNT


def test_what_was_merged_may_be_changed(table_name: Callable[[], str]) -> None:
    module, untouched = embedding(table_name()), embedding(table_name())
    for each in (module, untouched):
        kept = []
        for number in range(PASSES):
            outputs = call(each, number)
            kept.append(rows_like(number, outputs))
            outputs.backward(kept[-1])
        if each is module:
            kept[0].zero_()
        SparseOptimizer(modules=[each]).step()
    assert torch.equal(rows_of(module.table), rows_of(untouched.table))


def test_a_change_before_the_merge_is_refused(table_name: Callable[[], str]) -> None:
    module = embedding(table_name())
    outputs = call(module, 0)
    gradients = rows_like(0, outputs)
    outputs.backward(gradients)
    gradients.mul_(2)
    for number in range(1, PASSES):
        backward(module, number)
    with pytest.raises(RuntimeError, match="changed in place"):
        SparseOptimizer(modules=[module]).step()


def test_clearing_drops_what_was_merged(table_name: Callable[[], str]) -> None:
    module = embedding(table_name())
    for number in range(PASSES):
        backward(module, number)
    module.zero_grad()
    assert not module.table.has_collected()
    SparseOptimizer(modules=[module]).step()
    assert rows_of(module.table).eq(0.5).sum() >= (COUNT - 1) * DIM


def test_gradients_that_no_step_takes_are_told_of_once(
    table_name: Callable[[], str], capfd: pytest.CaptureFixture[str]
) -> None:
    name = table_name()
    module = DistEmbedding(None, 2, name)
    ids = torch.tensor([1, 2])
    optimizer = SparseOptimizer(modules=[module])
    for _ in range(2):
        for _ in range(1023):
            module(ids).sum().backward()
        optimizer.step()
    assert capfd.readouterr().err == ""
    for _ in range(3000):
        module(ids).sum().backward()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    told = f'warning: the module over table "{name}" has collected the gradients of 1024 backward passes, '
    assert told in lines[0]
    assert "give the module to a SparseOptimizer" in lines[0]


# A process of its own: elsewhere, memory that other tests freed would be used again unseen.
PROGRAM = """
import sys
import torch
from torch import nn
from recstore_ops import DistEmbedding, DistEmbeddingBag, KeyedJaggedTensor, RecStoreEmbeddingBagCollection
from recstore_ops.training.run.phases import process_bytes

torch.set_num_threads(1)
COUNT, DIM, ZEROS = 4096, 64, {"kind": "zeros"}
ids = torch.arange(COUNT)

def one(names):
    modules = [DistEmbedding(None, DIM, name, initializer=ZEROS) for name in names]
    return lambda: torch.stack([module(ids) for module in modules]).sum(0)

def features(names):
    # One table is a sixteenth of the others, and must not keep their gradients.
    dims = [DIM] * len(names) + [4]
    names = [*names, "small"]
    configs = [
        {"name": name, "num_embeddings": None, "embedding_dim": dim, "feature_names": [name]}
        for name, dim in zip(names, dims)
    ]
    bags = RecStoreEmbeddingBagCollection(configs, keyed_output=True, initializer=ZEROS)
    batch = KeyedJaggedTensor(names, ids.repeat(len(names)), lengths=torch.ones(len(names) * COUNT, dtype=torch.int64))
    return lambda: bags(batch).values()

call = {"rows": one, "features": features}[sys.argv[1]](sys.argv[2].split(","))
dense = nn.Linear(call().shape[1], 8)
if sys.argv[3] == "compiled":
    call = torch.compile(call, backend="aot_eager")

def backward():
    dense(call()).square().sum().backward()
    dense.zero_grad()

for _ in range(5):
    backward()
before = process_bytes()
for _ in range(100):
    backward()
print(process_bytes() - before)
"""


@pytest.mark.parametrize(
    ("kind", "names", "how"),
    [
        ("rows", "a", "eager"),
        pytest.param("features", "a,b", "eager", marks=pytest.mark.tier("all")),
        pytest.param("rows", "a,b,c,d", "eager", marks=pytest.mark.tier("all")),
        pytest.param("rows", "a", "compiled", marks=pytest.mark.tier("all")),
    ],
)
def test_many_passes_take_the_memory_of_their_sums(kind: str, names: str, how: str) -> None:
    grown = int(output_of(PROGRAM, kind, names, how))
    merged = (4096 * (64 + 2) * 4) * len(names.split(","))
    assert grown < 1.5 * merged + 32 * 2**20, f"{grown / 2**20:.0f} MiB"
