"""`torch.fx` and `torch.jit.script` over every kind of module: what they do with them, or one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from module_kinds import BATCH, DIM, IDS, KINDS, OFFSETS, Kind, each_kind
from torch import Tensor, fx, nn

from recstore_ops import (
    DistEmbeddingBag,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
)

pytestmark = pytest.mark.tier("test")

COLLECTIONS = [name for name in KINDS if "Collection" in name]
OTHERS = [name for name in KINDS if name not in COLLECTIONS]
each_collection = pytest.mark.parametrize("kind", [KINDS[name] for name in COLLECTIONS], ids=COLLECTIONS)
each_other = pytest.mark.parametrize("kind", [KINDS[name] for name in OTHERS], ids=OTHERS)

NO_SYMBOLS = (
    "torch.fx.symbolic_trace does not go into lookups: trace by a torch.fx.Tracer whose is_leaf_module holds for "
    "modules over tables, or use torch.compile or torch.export"
)


class Model(nn.Module):
    """A module over a table, and a dense layer."""

    def __init__(self, kind: Kind, name: str) -> None:
        super().__init__()
        self.sparse = kind.open(name)
        self.top = nn.Linear(DIM, 1)

    def forward(self, features: Any) -> Tensor:
        pooled = self.sparse(features)
        return self.top(pooled["seen"].values() if isinstance(self.sparse, RecStoreEmbeddingCollection) else pooled)


class OverBags(nn.Module):
    """A collection that pools, and a dense layer."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse
        self.top = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.top(self.sparse(features))


class OverRows(OverBags):
    """The same of one that does not."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.top(self.sparse(features)["seen"].values())


def over(collection: Any) -> OverBags:
    return OverRows(collection) if isinstance(collection, RecStoreEmbeddingCollection) else OverBags(collection)


class LeavesTables(fx.Tracer):
    """A tracer that does not go into modules over tables."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(m, "tables") or super().is_leaf_module(m, module_qualified_name)


def features_of(module: Any) -> Any:
    if isinstance(module, DistEmbeddingBag):
        return IDS.unsqueeze(0)
    return BATCH if hasattr(module, "feature_keys") else IDS


@each_other
def test_symbolic_tracing_is_refused_in_one_sentence(kind: Kind, table_name: Callable[[], str]) -> None:
    model = Model(kind, table_name())
    for traced in (model, model.sparse):
        with pytest.raises(TypeError, match=f"^{re.escape(NO_SYMBOLS)}$"):
            fx.symbolic_trace(traced)


@each_kind
def test_a_tracer_that_takes_tables_for_leaves_gives_a_graph_that_trains(
    kind: Kind, table_name: Callable[[], str]
) -> None:
    model = Model(kind, table_name())
    graph = fx.GraphModule(model, LeavesTables().trace(model))
    features = features_of(model.sparse)
    assert torch.equal(graph(features), model(features))
    graph(features).sum().backward()
    assert model.sparse.tables()[0].collected()


@each_collection
def test_symbolic_tracing_records_a_collection_as_one_node(kind: Kind, table_name: Callable[[], str]) -> None:
    model = over(kind.open(table_name()))
    for traced in (model, model.sparse):
        graph = fx.symbolic_trace(traced)
        graph.graph.lint()
        assert [node.op for node in graph.graph.nodes][:2] == ["placeholder", "call_module"]
    graph = fx.symbolic_trace(model)
    for _ in range(2):
        assert torch.equal(graph(BATCH), model(BATCH))
        graph(BATCH).sum().backward()
        SparseOptimizer(modules=[graph]).step()
    assert model(BATCH).any()


@each_collection
def test_torch_script_makes_programs_of_collections_that_read(
    kind: Kind, tmp_path: Path, table_name: Callable[[], str]
) -> None:
    model = over(kind.open(table_name()))
    program: Any = torch.jit.script(model)
    frozen = torch.jit.freeze(torch.jit.script(model).eval())
    torch.jit.save(program, tmp_path / "program.pt")
    programs = [program, frozen, torch.jit.load(tmp_path / "program.pt")]
    # The model is what it was, and programs read what it learns.
    for _ in range(2):
        with torch.no_grad():
            for each in programs:
                assert torch.equal(each(BATCH), model(BATCH))
        model(BATCH).sum().backward()
        SparseOptimizer(modules=[model]).step()


def test_a_program_weighs_and_orders_as_its_collection(table_name: Callable[[], str]) -> None:
    name = table_name()
    configs = [
        {"name": f"{name}/sum", "num_embeddings": 9, "embedding_dim": 2, "feature_names": ["a", "b"]},
        {"name": f"{name}/mean", "num_embeddings": 9, "embedding_dim": 3, "feature_names": ["b"], "pooling": "mean"},
    ]
    ids, lengths = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([1, 2, 0, 3], dtype=torch.int32)
    batches = [
        KeyedJaggedTensor(["b", "a"], ids, weights, lengths) for weights in (None, torch.tensor([1.0, -2, 2, 3, 1, 2]))
    ]
    for is_weighted in (None, False):
        bags = RecStoreEmbeddingBagCollection(configs, is_weighted=is_weighted, initializer={"kind": "normal"})
        program: Any = torch.jit.script(bags)
        with torch.no_grad():
            for batch in batches:
                got, expected = program(batch), bags(batch)
                assert (got.keys(), got.length_per_key()) == (expected.keys(), expected.length_per_key())
                torch.testing.assert_close(got.values(), expected.values())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (KeyedJaggedTensor(["seen", "other"], IDS, lengths=torch.tensor([2, 1])), "must hold the features"),
        (KeyedJaggedTensor([], IDS[:0], lengths=IDS[:0]), "must hold the features"),
        (KeyedJaggedTensor(["seen"], IDS, lengths=torch.tensor([2])), "the bags must cover the 3 values"),
        (
            KeyedJaggedTensor(["seen"], IDS, lengths=torch.tensor([3]), stride_per_key_per_rank=[[1]]),
            "takes batches of one number of examples for all features",
        ),
    ],
)
def test_a_program_refuses_batches_that_do_not_fit(
    batch: KeyedJaggedTensor, message: str, table_name: Callable[[], str]
) -> None:
    program: Any = torch.jit.script(KINDS["RecStoreEmbeddingCollection"].open(table_name()))
    with torch.no_grad(), pytest.raises(torch.jit.Error, match=message):
        program(batch)


def test_a_program_collects_no_gradients_and_says_so(table_name: Callable[[], str]) -> None:
    config = [{"name": table_name(), "num_embeddings": 9, "embedding_dim": 2, "feature_names": ["seen"]}]
    bags = RecStoreEmbeddingBagCollection(config, is_weighted=True)
    program: Any = torch.jit.script(bags)
    weighted = KeyedJaggedTensor(["seen"], IDS, torch.ones(3), torch.tensor([2, 1]))
    with pytest.raises(torch.jit.Error, match=r"collects no gradients: call it under torch\.no_grad\(\)"):
        program(weighted)
    with torch.no_grad(), pytest.raises(torch.jit.Error, match="is_weighted, and the batch has no weights"):
        program(BATCH)
    bags.requires_grad_(False)
    assert torch.equal(torch.jit.script(bags)(weighted), bags(weighted))


@each_other
def test_scripting_is_refused_in_one_sentence(kind: Kind, table_name: Callable[[], str]) -> None:
    name = table_name()
    model = Model(kind, name)
    sentence = (
        rf'^{type(model.sparse).__name__} over table "{re.escape(name)}" is Python that torch\.jit\.script cannot '
        r"compile: use torch\.compile or torch\.export, or script the dense part alone$"
    )
    for scripted in (model, model.sparse, nn.Sequential(model.sparse, model.top)):
        with pytest.raises(TypeError, match=sentence):
            torch.jit.script(scripted)
    assert torch.jit.script(model.top)(torch.ones(1, DIM)).shape == (1, 1)


def test_bags_with_factors_are_refused_too(table_name: Callable[[], str]) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = DistEmbeddingBag(5, DIM, table_name(), "sum")

        def forward(self, weights: Tensor) -> Tensor:
            return self.bag(IDS, OFFSETS, weights)

    with pytest.raises(TypeError, match=f"^{re.escape(NO_SYMBOLS)}$"):
        fx.symbolic_trace(Weighted())
