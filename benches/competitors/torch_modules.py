"""torch's own tables: `nn.EmbeddingBag` and `nn.Embedding`, sparse gradients, `torch.optim`."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from benches.yardstick import EPS, INITIAL_WEIGHT, LR


class TorchTable:
    """One weight matrix `[rows, dim]`, looked up by row number, trained by `adagrad` or `sgd`."""

    def __init__(self, rows: int, dim: int, optimizer: str = "adagrad") -> None:
        self._weight = torch.full((rows, dim), INITIAL_WEIGHT)
        self._kind = optimizer

    def lookup(self, index_N: Tensor) -> Tensor:
        """`F.embedding`."""
        return functional.embedding(index_N, self._weight)

    def step(self, index_N: Tensor, offsets_B: Tensor, grad_BD: Tensor) -> None:
        """Looks sums of bags up, takes the gradients, and an optimizer step."""
        self._optimizer.zero_grad()
        self._bags(index_N, offsets_B).backward(grad_BD)
        self._optimizer.step()

    @cached_property
    def _bags(self) -> nn.EmbeddingBag:
        return nn.EmbeddingBag.from_pretrained(self._weight, freeze=False, mode="sum", sparse=True)

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        """Made by the first step: its state takes as much memory as the weights."""
        if self._kind == "sgd":
            return torch.optim.SGD(self._bags.parameters(), lr=LR)
        return torch.optim.Adagrad(self._bags.parameters(), lr=LR, eps=EPS)


class TorchCollection:
    """Tables of equal size, an `nn.EmbeddingBag(sparse=True)` each, and one `torch.optim.Adagrad`."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        weights = [torch.full((rows, dim), INITIAL_WEIGHT) for _ in range(tables)]
        self._bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True) for weight in weights
        )
        self._optimizer = torch.optim.Adagrad(self._bags.parameters(), lr=LR, eps=EPS)

    def step(self, index_FB: Tensor, grad_BFD: Tensor) -> None:
        """Looks up one id a bag of each table, takes the gradients, and an optimizer step."""
        self._optimizer.zero_grad()
        pairs = zip(self._bags, index_FB, strict=True)
        torch.stack([bag(index_B[:, None]) for bag, index_B in pairs], 1).backward(grad_BFD)
        self._optimizer.step()


class SparseAdamTable:
    """`nn.Embedding(sparse=True)` with `torch.optim.SparseAdam`."""

    def __init__(self, rows: int, dim: int) -> None:
        weight = torch.full((rows, dim), INITIAL_WEIGHT)
        self._module = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        self._optimizer = torch.optim.SparseAdam(list(self._module.parameters()), lr=LR)
        self._touch_state(dim)

    def step(self, index_N: Tensor, grad_ND: Tensor) -> None:
        """Looks rows up, takes the gradients, and a step."""
        self._optimizer.zero_grad()
        self._module(index_N).backward(grad_ND)
        self._optimizer.step()

    def _touch_state(self, dim: int) -> None:
        """Makes the optimizer's state and its pages, which otherwise would come while steps are timed."""
        self.step(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dim))
        for state in self._optimizer.state.values():
            state["exp_avg"].fill_(0)
            state["exp_avg_sq"].fill_(0)
