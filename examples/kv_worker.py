"""Logistic regression by hand, after ps-lite: workers pull weights, compute gradients and push them at their own pace.

Of a thousand features ten decide whether there is a click; FTRL keeps most of the others at exactly zero. Two workers
train on halves of the rows; each pulls the weights of its next batch while it computes this one, so they may be a batch
old. The table is in this process, or on servers where `set_ps_servers` or `recstore_config.json` say so.

    python examples/kv_worker.py

Shape suffixes: B examples, F features of an example, U distinct features of a batch.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from recstore_ops import KVWorker
from recstore_ops.training import auc

FEATURES, FEATURES_PER_ROW, DECIDING, BATCH, EPOCHS = 1000, 6, 10, 100, 4
TRAIN_ROWS, TEST_ROWS, WORKERS = 20_000, 5_000, 2
FTRL = {"kind": "ftrl", "alpha": 0.1, "beta": 1.0, "l1": 25.0, "l2": 0.0}


def open_worker() -> KVWorker:
    # Workers of one app share its table.
    return KVWorker("lr/w", dim=1, optimizer=FTRL, initializer="zeros")


def slopes(weights_U: Tensor, places_BF: Tensor, labels_B: Tensor) -> Tensor:
    """The derivative of each example's loss, -log p(label), by its logit: p - label, [B]."""
    return torch.sigmoid(weights_U[places_BF].sum(1)) - labels_B


def train(features_BF: Tensor, labels_B: Tensor) -> None:
    with torch.no_grad(), open_worker() as worker:
        batches = [batch_BF.unique(return_inverse=True) for batch_BF in features_BF.split(BATCH)]
        pulled = worker.pull(batches[0][0])
        for number, batch_labels_B in enumerate(labels_B.split(BATCH)):
            keys_U, places_BF = batches[number]
            weights_U = worker.wait_rows(pulled)[:, 0]
            if number + 1 < len(batches):
                pulled = worker.pull(batches[number + 1][0], priority=1)
            slopes_B = slopes(weights_U, places_BF, batch_labels_B)
            # d logit / d w = 1 for each feature of an example.
            gradients_U = torch.zeros(len(keys_U)).index_add_(
                0, places_BF.flatten(), slopes_B.repeat_interleave(FEATURES_PER_ROW)
            )
            worker.push(keys_U, gradients_U)
    # The end of the block has waited for the pushes, and would have raised what any of them failed with.


def draw_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Features [rows, F]; labels and true logits, [rows]. The first feature of a row is one of those that decide."""
    num_rows = TRAIN_ROWS + TEST_ROWS
    features_BF = torch.randint(DECIDING, FEATURES, (num_rows, FEATURES_PER_ROW))
    features_BF[:, 0] = torch.randint(DECIDING, (num_rows,))
    logits_B = torch.linspace(-2.5, 2.5, DECIDING)[features_BF[:, 0]]
    return features_BF, torch.bernoulli(torch.sigmoid(logits_B)), logits_B


def predict(worker: KVWorker, features_BF: Tensor) -> Tensor:
    """Logits, [B]; a feature that was never trained has the weight zero and gets no row."""
    return worker.wait_rows(worker.pull(features_BF.flatten())).view(features_BF.shape).sum(1)


def main() -> None:
    torch.manual_seed(0)
    features_BF, labels_B, logits_B = draw_rows()
    test_features_BF, test_labels_B = features_BF[TRAIN_ROWS:], labels_B[TRAIN_ROWS:]
    parts = list(zip(features_BF[:TRAIN_ROWS].chunk(WORKERS), labels_B[:TRAIN_ROWS].chunk(WORKERS), strict=True))
    score = zeros = 0.0
    with open_worker() as worker, ThreadPoolExecutor(WORKERS) as pool:
        print("epoch      AUC   useless weights that are zero")
        for epoch in range(1, EPOCHS + 1):
            for trained in [pool.submit(train, *part) for part in parts]:
                trained.result()
            weights = worker.wait_rows(worker.pull(range(DECIDING, FEATURES)))
            score = auc(test_labels_B, predict(worker, test_features_BF))
            zeros = (weights == 0).float().mean().item()
            print(f"{epoch:5}   {score:.4f}   {zeros:.3f}")
    bayes = auc(test_labels_B, logits_B[TRAIN_ROWS:])
    print(f"AUC of the true logits: {bayes:.4f}")
    assert bayes - 0.01 < score < bayes + 0.005
    assert zeros > 0.8


if __name__ == "__main__":
    main()
