"""Workers as Ray tasks train one model whose tables lie on servers that Ray runs.

Whether a user clicks on an item depends on a hidden weight of each. Four shards are placed on the cluster, two workers
draw their own batches and train the same two tables, each as fast as it can. `ray.init()` alone starts a cluster on
this machine; with `address="auto"` the same program runs on yours, where `data` is a directory that all nodes see.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

import recstore_ops.ray as on_ray
from recstore_ops import DistEmbedding, SparseOptimizer

USERS, ITEMS, BATCH = 2_000, 500, 512
SHARDS, WORKERS, ROUNDS, STEPS = 4, 2, 3, 60


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Users, items, the probability of a click, and whether there is one."""
    hidden = torch.Generator().manual_seed(7)
    user_weights, item_weights = torch.randn(USERS, generator=hidden), torch.randn(ITEMS, generator=hidden)
    users = torch.randint(USERS, (BATCH,), generator=generator)
    items = torch.randint(ITEMS, (BATCH,), generator=generator)
    probabilities = torch.sigmoid(1.5 * (user_weights[users] + item_weights[items]))
    return users, items, probabilities, torch.bernoulli(probabilities, generator=generator)


class Model(torch.nn.Module):
    """A weight for each user and each item."""

    def __init__(self) -> None:
        super().__init__()
        optimizer, zeros = {"kind": "adagrad", "lr": 0.5}, {"kind": "zeros"}
        self.user = DistEmbedding(None, 1, "user", optimizer=optimizer, initializer=zeros)
        self.item = DistEmbedding(None, 1, "item", optimizer=optimizer, initializer=zeros)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.user(users) + self.item(items)).squeeze(-1)


@ray.remote(num_cpus=1)
def train(worker: int, round_number: int) -> None:
    """A worker's steps; its tables are those of all."""
    on_ray.connect()
    model = Model()
    optimizer = SparseOptimizer(modules=[model.user, model.item])
    generator = torch.Generator().manual_seed(1000 * round_number + worker)
    for _ in range(STEPS):
        users, items, _, clicks = batch(generator)
        binary_cross_entropy_with_logits(model(users, items), clicks, reduction="sum").backward()
        optimizer.step()


def evaluate(model: Model) -> tuple[float, float]:
    """The logloss of the model, and of the hidden weights themselves, on clicks that no worker has seen."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        users, items, probabilities, clicks = (
            torch.cat(part) for part in zip(*(batch(generator) for _ in range(20)), strict=True)
        )
        loss = binary_cross_entropy_with_logits(model(users, items), clicks)
        return float(loss), float(binary_cross_entropy(probabilities, clicks))


def main() -> None:
    ray.init(num_cpus=SHARDS + WORKERS, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as data:
        servers = on_ray.start_servers(SHARDS, data=data, insecure=True)
        servers.use()
        model = Model()
        loss, best = evaluate(model)
        print(f"round  logloss\n    0  {loss:.4f}")
        for round_number in range(1, ROUNDS + 1):
            ray.get([train.remote(worker, round_number) for worker in range(WORKERS)])
            loss, best = evaluate(model)
            print(f"{round_number:5}  {loss:.4f}")
        print(f"the hidden weights themselves: {best:.4f}")
        servers.stop()
    ray.shutdown()
    assert loss < best + 0.1, "the workers have not learnt the weights"


if __name__ == "__main__":
    main()
