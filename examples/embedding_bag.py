"""A click model before and after: `nn.EmbeddingBag` and `torch.optim.Adagrad`, then `DistEmbeddingBag` and
`SparseOptimizer`. From equal rows both give equal losses.

    python examples/embedding_bag.py
"""

import torch
from torch import Tensor, nn

from recstore_ops import DistEmbeddingBag, SparseOptimizer

NUM_EMBEDDINGS, DIM, BATCH, STEPS = 1_000, 16, 256, 100

torch.manual_seed(0)
INITIAL_ROWS = 0.1 * torch.randn(NUM_EMBEDDINGS, DIM)
LOG_ODDS = torch.randn(NUM_EMBEDDINGS)
"""What each id adds to the log-odds of a click: what the models are to find."""


class ClickModel(nn.Module):
    """Two dense layers over the sum of the rows of each bag."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = bags
        self.dense = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.dense(self.bags(ids, offsets)).squeeze(1)


def before() -> list[float]:
    bags = nn.EmbeddingBag(NUM_EMBEDDINGS, DIM, mode="sum", sparse=True, _weight=INITIAL_ROWS.clone())
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.05)
    return train(ClickModel(bags), optimizer)


def after() -> list[float]:
    bags = DistEmbeddingBag(
        NUM_EMBEDDINGS,  # None lets the table grow by id; then leave out init_func as well.
        DIM,
        "clicks",
        mode="sum",
        init_func=lambda shape, dtype: INITIAL_ROWS,
        optimizer={"kind": "adagrad", "convention": "torch", "lr": 0.05},
    )
    optimizer = SparseOptimizer(modules=[bags])
    return train(ClickModel(bags), optimizer)


def train(model: ClickModel, optimizer: torch.optim.Optimizer) -> list[float]:
    """The loss of each step; nothing here knows which of the two models it trains."""
    dense_optimizer = torch.optim.Adagrad(model.dense.parameters(), lr=0.05)
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(STEPS):
        ids, offsets, labels = draw_batch(generator)
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, offsets), labels)
        optimizer.zero_grad()
        dense_optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dense_optimizer.step()
        losses.append(loss.item())
    return losses


def draw_batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Bags of one to eight ids, some twice: ids, where each bag begins, and whether it was clicked."""
    lengths = torch.randint(1, 9, (BATCH,), generator=generator)
    ids = torch.randint(NUM_EMBEDDINGS, (int(lengths.sum()),), generator=generator)
    log_odds = torch.segment_reduce(LOG_ODDS[ids], "sum", lengths=lengths)
    labels = torch.bernoulli(torch.sigmoid(log_odds), generator=generator)
    return ids, lengths.cumsum(0) - lengths, labels


def main() -> None:
    theirs, ours = before(), after()
    print("step   nn.EmbeddingBag   DistEmbeddingBag")
    for step in [*range(0, STEPS, 20), STEPS - 1]:
        print(f"{step:4}   {theirs[step]:15.6f}   {ours[step]:16.6f}")
    difference = max(abs(one - other) for one, other in zip(theirs, ours, strict=True))
    print(f"greatest difference of a loss: {difference:.1e}")
    assert difference < 1e-5
    assert ours[-1] < ours[0] - 0.05, "the models learn"


if __name__ == "__main__":
    main()
