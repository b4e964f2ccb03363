"""A model of clicks over two embeddings, and the same one over tables, to be trained by trainers of others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from recstore_ops import SparseOptimizer, replace_embeddings

NUM, DIM, BATCH, LR = 20, 4, 16, 0.1


class Clicks(nn.Module):
    """The logit of a click, of a user and an item."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(NUM, DIM), nn.Embedding(NUM, DIM)
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, pairs_B2: Tensor) -> Tensor:
        return self.head(torch.cat([self.user(pairs_B2[:, 0]), self.item(pairs_B2[:, 1])], dim=1)).squeeze(1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1])


def made(over_tables: bool) -> tuple[Clicks, SparseOptimizer | None]:
    """The model, always with the same values, and the optimizer of its tables."""
    torch.manual_seed(0)
    model = Clicks()
    if not over_tables:
        return model, None
    rule = {"kind": "adagrad", "lr": LR, "convention": "torch"}
    return model, replace_embeddings(model, prefix="clicks/", optimizer=rule).optimizer


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all parameters, which passes over tables."""
    return torch.optim.Adagrad(model.parameters(), lr=LR)


def batches(count: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    draws = torch.Generator().manual_seed(count)
    pairs = torch.randint(NUM, (count * BATCH, 2), generator=draws)
    return DataLoader(TensorDataset(pairs, torch.randint(2, (len(pairs),), generator=draws).float()), BATCH)


class Outcome(NamedTuple):
    """What a program gave."""

    losses: Tensor
    rows: Tensor
    head: Tensor

    @staticmethod
    def of(model: Clicks, losses: list[float]) -> Outcome:
        ids = torch.arange(NUM)
        rows = torch.cat([model.user(ids), model.item(ids)])
        return Outcome(torch.tensor(losses), rows.detach(), model.head.weight.detach().clone())


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    for name, value in expected._asdict().items():
        found = getattr(outcome, name)
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
