"""`torch.fx` and `torch.jit.script` over every kind of module: what they do with them, or one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import BATCH, DIM, IDS, OFFSETS, Kind, each_kind
from torch import Tensor, fx, nn

from recstore_ops import DistEmbeddingBag, RecStoreEmbeddingCollection

pytestmark = pytest.mark.tier("test")

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


class LeavesTables(fx.Tracer):
    """A tracer that does not go into modules over tables."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(m, "tables") or super().is_leaf_module(m, module_qualified_name)


def features_of(module: Any) -> Any:
    if isinstance(module, DistEmbeddingBag):
        return IDS.unsqueeze(0)
    return BATCH if hasattr(module, "feature_keys") else IDS


@each_kind
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


@each_kind
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
