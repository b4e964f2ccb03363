"""Online learning on a stream whose ids change: every day new items appear and old ones go.

Each batch is predicted before it is trained on (progressive validation), so every figure is about clicks that the
model had not seen. The same model, trained on the first day only, shows what standing still costs.

    python examples/online_learning.py
"""

import torch
from torch import Tensor, nn

from recstore_ops import DistEmbeddingBag, SparseOptimizer, table_statistics
from recstore_ops.training import auc, logloss

DAYS, BATCHES_PER_DAY, BATCH = 7, 50, 256
NEW_ITEMS_PER_DAY, DAYS_OF_AN_ITEM, CATEGORIES, USERS = 400, 2, 20, 2_000


class Stream:
    """Clicks on items that are shown for a few days. Ids are drawn from all int64, as hashes would be."""

    def __init__(self) -> None:
        num_items = NEW_ITEMS_PER_DAY * (DAYS + DAYS_OF_AN_ITEM)
        self.item_ids, self.category_ids, self.user_ids = map(draw_ids, (num_items, CATEGORIES, USERS))
        self.category_of_item = torch.randint(CATEGORIES, (num_items,))
        self.item_appeal = torch.randn(CATEGORIES)[self.category_of_item] + torch.randn(num_items)
        self.user_appeal = 0.5 * torch.randn(USERS)

    def batch(self, day: int) -> tuple[Tensor, Tensor]:
        """Ids of item, category and user, [BATCH, 3], and labels, [BATCH]."""
        item = NEW_ITEMS_PER_DAY * day + torch.randint(NEW_ITEMS_PER_DAY * DAYS_OF_AN_ITEM, (BATCH,))
        user = torch.randint(USERS, (BATCH,))
        category_ids = self.category_ids[self.category_of_item[item]]
        labels = torch.bernoulli(torch.sigmoid(self.item_appeal[item] + self.user_appeal[user] - 1))
        return torch.stack([self.item_ids[item], category_ids, self.user_ids[user]], dim=1), labels


def draw_ids(count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,))


class Model:
    """Logistic regression by FTRL: the logit is the sum of one weight for each id, zero until it is trained."""

    def __init__(self, name: str) -> None:
        ftrl = {"kind": "ftrl", "alpha": 0.2, "l2": 1.0}
        self.weights = DistEmbeddingBag(None, 1, name, mode="sum", initializer="zeros", optimizer=ftrl)
        self.optimizer = SparseOptimizer(modules=[self.weights])

    def rows(self) -> int:
        return table_statistics(self.weights.name)["rows"]

    def predict(self, ids: Tensor) -> Tensor:
        """Logits, [BATCH]. An id without a row reads as its initial value, and reading gives it none."""
        rows = self.rows()
        with torch.no_grad():
            logits = self.weights(ids).squeeze(1)
        assert self.rows() == rows
        return logits

    def train_step(self, ids: Tensor, labels: Tensor) -> None:
        logits = self.weights(ids).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum").backward()
        self.optimizer.step()

    def run(self, batches: list[tuple[Tensor, Tensor]], is_learning: bool) -> Tensor:
        """Predicts batch by batch, each before it is learnt from; returns all logits."""
        logits = []
        for ids, labels in batches:
            logits.append(self.predict(ids))
            if is_learning:
                self.train_step(ids, labels)
        return torch.cat(logits)


def main() -> None:
    torch.manual_seed(0)
    stream, online, frozen = Stream(), Model("online"), Model("frozen")
    online_auc = frozen_auc = 0.0
    print("day    rows   unseen ids   logloss     AUC   AUC of the model of day 1")
    for day in range(1, DAYS + 1):
        batches, rows = [stream.batch(day) for _ in range(BATCHES_PER_DAY)], online.rows()
        ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        logits, frozen_logits = online.run(batches, is_learning=True), frozen.run(batches, is_learning=day == 1)
        unseen = (online.rows() - rows) / len(ids.unique())
        online_auc, frozen_auc = auc(labels, logits), auc(labels, frozen_logits)
        figures = f"{unseen:10.1%}   {logloss(labels, logits):7.4f}   {online_auc:.4f}   {frozen_auc:.4f}"
        print(f"{day:3}   {online.rows():5}   {figures}")
    assert online_auc > frozen_auc + 0.03


if __name__ == "__main__":
    main()
