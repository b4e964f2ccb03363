"""A TorchRec model moved over: `EmbeddingBagCollection` becomes `RecStoreEmbeddingBagCollection`; the rest stays.

Where TorchRec is installed, both train from equal rows and are compared. Where it is not, ours trains alone, on the
package's own `KeyedJaggedTensor`.

    python examples/from_torchrec.py
"""

from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops import RecStoreEmbeddingBagCollection, SparseOptimizer

try:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # type: ignore
except ImportError:
    from recstore_ops import EmbeddingBagConfig, KeyedJaggedTensor

    EmbeddingBagCollection: Any = None

USERS, ITEMS, DIM, DENSE, BATCH, STEPS, LR = 200, 100, 8, 4, 128, 100, 0.1
FEATURES = ["user", "item", "seen"]
TABLES: Any = [
    EmbeddingBagConfig(name="t_user", num_embeddings=USERS, embedding_dim=DIM, feature_names=["user"]),
    EmbeddingBagConfig(name="t_item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item", "seen"]),
]


class DLRM(nn.Module):
    """Dense features and pooled rows, the dot products of all pairs of them, and layers over those."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)  # For the layers here and the batches that follow: all models get the same.
        self.bags = bags
        self.dense_arch = nn.Sequential(nn.Linear(DENSE, DIM), nn.ReLU())
        self.left, self.right = torch.combinations(torch.arange(1 + len(FEATURES))).T
        self.over_arch = nn.Sequential(nn.Linear(DIM + len(self.left), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        dense = self.dense_arch(dense)
        pooled = self.bags(features).values().view(-1, len(FEATURES), DIM)
        vectors = torch.cat([dense.unsqueeze(1), pooled], dim=1)
        products = (vectors[:, self.left] * vectors[:, self.right]).sum(2)
        return self.over_arch(torch.cat([dense, products], dim=1)).squeeze(1)


def draw_batch() -> tuple[Tensor, Any, Tensor]:
    """Dense features; for each example a user, an item, and up to five items seen before; labels."""
    dense, user, item = torch.randn(BATCH, DENSE), torch.randint(USERS, (BATCH,)), torch.randint(ITEMS, (BATCH,))
    lengths = torch.cat([torch.ones(2 * BATCH, dtype=torch.int64), torch.randint(6, (BATCH,))])
    seen = torch.randint(ITEMS, (int(lengths.sum()) - 2 * BATCH,))
    features = KeyedJaggedTensor(FEATURES, torch.cat([user, item, seen]), lengths=lengths)
    return dense, features, torch.bernoulli(torch.sigmoid(torch.linspace(-3, 3, ITEMS)[item] + dense[:, 0]))


def train(bags: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """The loss of each step, and the logits of one more batch; nothing here knows whose the bags are."""
    model, losses = DLRM(bags), []
    optimizers = [optimizer, torch.optim.Adagrad([*model.dense_arch.parameters(), *model.over_arch.parameters()], LR)]
    for _ in range(STEPS):
        *inputs, labels = draw_batch()
        loss = nn.functional.binary_cross_entropy_with_logits(model(*inputs), labels)
        loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), model(*draw_batch()[:2]).detach()


def train_torchrec(ours: RecStoreEmbeddingBagCollection) -> tuple[Tensor, Tensor]:
    """Trains TorchRec's collection, after giving ours its initial rows."""
    bags = EmbeddingBagCollection(tables=TABLES)
    for name, table in bags.embedding_bags.items():
        ours.embedding_bags[name].weight[torch.arange(table.num_embeddings)] = table.weight.detach()
    return train(bags, torch.optim.Adagrad(bags.parameters(), lr=LR))


def main() -> None:
    torch.manual_seed(0)
    adagrad = {"kind": "adagrad", "convention": "torch", "lr": LR}
    bags = RecStoreEmbeddingBagCollection(TABLES, optimizer=adagrad, keyed_output=True)
    theirs = train_torchrec(bags) if EmbeddingBagCollection else None
    losses, logits = train(bags, SparseOptimizer(modules=[bags]))
    print(f"loss of the first ten steps {losses[:10].mean():.4f}, of the last ten {losses[-10:].mean():.4f}")
    assert losses[-10:].mean() < losses[:10].mean() - 0.05
    if theirs is None:
        print("TorchRec is not installed: ours trained alone")
        return
    difference = max(float((losses - theirs[0]).abs().max()), float((logits - theirs[1]).abs().max()))
    print(f"greatest difference to TorchRec, in losses and logits: {difference:.1e}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
