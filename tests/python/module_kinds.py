"""Every kind of module over tables, each beside the module of `torch.nn` that it stands for.

The bags and rows are the same: ids 1 and 2 together, then 2 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    Table,
)

NUM, DIM, LR = 5, 2, 1.0
IDS, OFFSETS = torch.tensor([1, 2, 2]), torch.tensor([0, 2])
BATCH = KeyedJaggedTensor(["seen"], IDS, lengths=torch.tensor([2, 1]))
OPTIONS: dict[str, Any] = {"initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": LR}}


def _config(name: str, **more: Any) -> list[dict[str, Any]]:
    return [{"name": name, "num_embeddings": NUM, "embedding_dim": DIM, "feature_names": ["seen"], **more}]


@dataclass
class Kind:
    """A kind of module, and what torch has in its place.

    Attributes:
        open: makes the module over the table of a name.
        outputs: what it gives for the ids.
        rival: the module of torch.
        of_rival: what that gives for the ids.
    """

    open: Callable[[str], Any]
    outputs: Callable[[Any], Tensor]
    rival: Callable[[], nn.Embedding | nn.EmbeddingBag]
    of_rival: Callable[[Any], Tensor]


def _embedding() -> nn.Embedding:
    return nn.Embedding(NUM, DIM, _weight=torch.zeros(NUM, DIM))


def _bag() -> nn.EmbeddingBag:
    return nn.EmbeddingBag(NUM, DIM, mode="sum", _weight=torch.zeros(NUM, DIM))


def _bags(name: str, **options: Any) -> RecStoreEmbeddingBagCollection:
    return RecStoreEmbeddingBagCollection(_config(name), **options, **OPTIONS)


KINDS = {
    "DistEmbedding": Kind(
        lambda name: DistEmbedding(NUM, DIM, name, **OPTIONS),
        lambda module: module(IDS),
        _embedding,
        lambda rival: rival(IDS),
    ),
    "DistEmbeddingBag": Kind(
        lambda name: DistEmbeddingBag(NUM, DIM, name, "sum", **OPTIONS),
        lambda module: module(IDS, OFFSETS),
        _bag,
        lambda rival: rival(IDS, OFFSETS),
    ),
    "HashTable": Kind(
        lambda name: HashTable(DIM, name, num_embeddings=NUM, **OPTIONS),
        lambda module: module(IDS),
        _embedding,
        lambda rival: rival(IDS),
    ),
    "RecStoreEmbeddingBagCollection": Kind(
        _bags, lambda module: module(BATCH).squeeze(1), _bag, lambda rival: rival(IDS, OFFSETS)
    ),
    "RecStoreEmbeddingBagCollection, not fused": Kind(
        lambda name: _bags(name, enable_fusion=False),
        lambda module: module(BATCH).squeeze(1),
        _bag,
        lambda rival: rival(IDS, OFFSETS),
    ),
    "RecStoreEmbeddingCollection": Kind(
        lambda name: RecStoreEmbeddingCollection(_config(name), **OPTIONS),
        lambda module: module(BATCH)["seen"].values(),
        _embedding,
        lambda rival: rival(IDS),
    ),
}

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


class Pair:
    """A module in a model, and the model of torch beside it, each with its optimizers.

    Attributes:
        module: ours.
        top: a dense layer.
        model: the module and that.
        optimizer: of its table.
        rival: the module of torch.
        rival_top: the dense layer over that.
        rival_model: both.
    """

    def __init__(self, kind: Kind, name: str) -> None:
        self._kind = kind
        self.module = kind.open(name)
        self.top, self.rival_top = nn.Linear(DIM, 1), nn.Linear(DIM, 1)
        self.model = nn.ModuleList([self.module, self.top])
        self.optimizer = SparseOptimizer(modules=[self.module])
        self.rival = kind.rival()
        self.rival_model = nn.ModuleList([self.rival, self.rival_top])
        self._rival_optimizer = torch.optim.SGD(self.rival.parameters(), lr=LR)

    @property
    def table(self) -> Table:
        """The table of the module."""
        return self.module.tables()[0]

    def outputs(self) -> tuple[Tensor, Tensor]:
        """What both give for the ids."""
        return self._kind.outputs(self.module), self._kind.of_rival(self.rival)

    def backward(self, factor: float = 1.0) -> None:
        """Computes gradients of both through their dense layers, whose weights are made ones."""
        for outputs, top in zip(self.outputs(), (self.top, self.rival_top), strict=True):
            nn.init.ones_(top.weight)
            (factor * top(outputs)).sum().backward()

    def step(self) -> None:
        """Steps both."""
        self.optimizer.step()
        self.step_rival()

    def step_rival(self) -> None:
        """Steps the module of torch alone."""
        self._rival_optimizer.step()

    def rows(self) -> Tensor:
        """The rows of our table."""
        with torch.no_grad():
            return torch.ops.recstore.emb_read.table(self.table.handle, torch.arange(NUM), DIM)

    def assert_equal_rows(self) -> None:
        """Checks that both have the same rows, to the bit: the gradients are small integers."""
        assert torch.equal(self.rows(), self.rival.weight.detach())


@pytest.fixture
def pair(kind: Kind, table_name: Callable[[], str]) -> Pair:
    return Pair(kind, table_name())
