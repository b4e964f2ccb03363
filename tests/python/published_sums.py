"""A model whose rows and dense tensor all hold one number: who reads a part of a step sees two."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding
from recstore_ops.ops import operators
from recstore_ops.serving import Publisher, publish

ROWS, DIM = 500, 2
IDS = torch.arange(ROWS)


class Sums(nn.Module):
    """Two tables and a buffer."""

    number: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second = (DistEmbedding(None, DIM, f"{name} {place}") for place in ("first", "second"))
        self.register_buffer("number", torch.zeros((), device="cpu"))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns all that holds the number, flat."""
        return torch.cat([self.first(ids).flatten(), self.second(ids).flatten(), self.number.reshape(1)])

    def write(self, number: int) -> None:
        """Takes a step: all hold the number."""
        rows = torch.full((ROWS, DIM), float(number), device="cpu")
        for module in (self.first, self.second):
            operators.emb_write(module.table.handle, IDS, rows)
        self.number.fill_(number)


def published(name: str, directory: Path, first: int) -> tuple[Sums, Publisher]:
    """The model at a number, and who publishes it."""
    model = Sums(name)
    model.write(first)
    return model, publish(model, (IDS,), directory, interval=0)


def train(name: str, directory: Path, first: int, steps: int | None) -> None:
    """Trains from a number on, for so many steps, or until the process is killed."""
    model, publisher = published(name, directory, first)
    number = first
    while steps is None or number < first + steps:
        number += 1
        model.write(number)
        publisher.step()
    publisher.close()
