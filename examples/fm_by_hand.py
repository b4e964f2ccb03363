"""A factorization machine by hand: `RecStoreClient` pulls rows and takes updates; the gradient is written out.

    logit = sum_i w_i + 1/2 sum_k [(sum_i v_ik)^2 - sum_i v_ik^2]

Clicks depend on planted pairs of ids, which a linear model (the first sum alone) cannot see.

    python examples/fm_by_hand.py

Shape suffixes: B examples, F fields, D columns of v.
"""

import torch
from torch import Tensor

from recstore_ops import EmbeddingTableConfig, RecStoreClient
from recstore_ops.training import auc

FIELDS, IDS_PER_FIELD, DIM, BATCH, EPOCHS = 8, 50, 4, 200, 6
TRAIN_ROWS, TEST_ROWS = 40_000, 10_000
BIAS = -1
"""The id whose weight every example has: any int64 is an id."""

client = RecStoreClient()


def open_tables() -> None:
    adagrad = {"kind": "adagrad", "lr": 0.1}
    client.init_embedding_table("linear/w", EmbeddingTableConfig(None, 1, adagrad, "zeros"))
    client.init_embedding_table("fm/w", EmbeddingTableConfig(None, 1, adagrad, "zeros"))
    # With zeros v would never move: the gradient of a row is a product with other rows.
    client.init_embedding_table("fm/v", EmbeddingTableConfig(None, DIM, adagrad, {"kind": "normal", "std": 0.1}))


def sum_of_pairs(v_BFD: Tensor) -> Tensor:
    """The sum over all pairs of rows of their dot product, [B]. The square is taken of each column by itself."""
    return 0.5 * (v_BFD.sum(1).square() - v_BFD.square().sum(1)).sum(1)


def with_bias(ids_BF: Tensor) -> Tensor:
    return torch.nn.functional.pad(ids_BF, (0, 1), value=BIAS)


def predict(model: str, ids_BF: Tensor) -> Tensor:
    """Logits, [B]; an id that was never trained reads as its initial value and gets no row."""
    logits_B = client.pull(f"{model}/w", with_bias(ids_BF)).sum((1, 2))
    return logits_B + sum_of_pairs(client.pull("fm/v", ids_BF)) if model == "fm" else logits_B


def train_step(model: str, ids_BF: Tensor, labels_B: Tensor) -> None:
    # The mean loss, -log p(label), has the derivative (p - label) / B by the logit of an example.
    slopes_B = (torch.sigmoid(predict(model, ids_BF)) - labels_B) / len(labels_B)
    if model == "fm":
        # d logit / d v_ik = sum_j v_jk - v_ik: what the other rows of the example add up to.
        v_BFD = client.pull("fm/v", ids_BF)
        client.update("fm/v", ids_BF, slopes_B[:, None, None] * (v_BFD.sum(1, keepdim=True) - v_BFD))
    # d logit / d w_i = 1. The gradients of an id that occurs several times are summed before its step.
    client.update(f"{model}/w", with_bias(ids_BF), slopes_B[:, None, None].expand(-1, FIELDS + 1, 1))


def draw_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Ids [rows, F]; labels and true logits, [rows]."""
    num_ids, num_rows = FIELDS * IDS_PER_FIELD, TRAIN_ROWS + TEST_ROWS
    w, v = 0.3 * torch.randn(num_ids), 0.45 * torch.randn(num_ids, DIM)
    ids_BF = torch.randint(IDS_PER_FIELD, (num_rows, FIELDS)) + IDS_PER_FIELD * torch.arange(FIELDS)
    logits_B = -1 + w[ids_BF].sum(1) + sum_of_pairs(v[ids_BF])
    return ids_BF, torch.bernoulli(torch.sigmoid(logits_B)), logits_B


def train_epoch(model: str, ids_BF: Tensor, labels_B: Tensor) -> None:
    for batch_BF, batch_labels_B in zip(ids_BF.split(BATCH), labels_B.split(BATCH), strict=True):
        train_step(model, batch_BF, batch_labels_B)


def main() -> None:
    torch.manual_seed(0)
    ids_BF, labels_B, logits_B = draw_rows()
    test_ids_BF, test_labels_B = ids_BF[TRAIN_ROWS:], labels_B[TRAIN_ROWS:]
    open_tables()
    aucs: dict[str, float] = {}
    print("epoch   linear AUC   FM AUC")
    for epoch in range(1, EPOCHS + 1):
        for model in ("linear", "fm"):
            train_epoch(model, ids_BF[:TRAIN_ROWS], labels_B[:TRAIN_ROWS])
            aucs[model] = auc(test_labels_B, predict(model, test_ids_BF))
        print(f"{epoch:5}   {aucs['linear']:10.4f}   {aucs['fm']:6.4f}")
    print(f"AUC of the true logits: {auc(test_labels_B, logits_B[TRAIN_ROWS:]):.4f}")
    assert aucs["fm"] > 0.8 > 0.7 > aucs["linear"]


if __name__ == "__main__":
    main()
