"""Trains a model with an installed wheel: what a new user does first. Prints how many rows its table has."""

import torch

import recstore_ops

model = torch.nn.Sequential(torch.nn.EmbeddingBag(1_000, 8), torch.nn.Linear(8, 1))
replaced = recstore_ops.replace_embeddings(model, grows=True, optimizer={"kind": "adagrad", "lr": 0.1})
dense = torch.optim.Adagrad(replaced.dense_parameters(), lr=0.1)
ids, labels = torch.randint(2**62, (256, 4)), torch.randint(2, (256, 1)).float()

losses = []
for _ in range(20):
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
    loss.backward()
    for optimizer in (replaced.optimizer, dense):
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
rows = recstore_ops.table_statistics("0")["rows"]
assert rows == 1_000 + ids.numel(), rows
assert losses[-1] < losses[0], losses
# Errors are exceptions of C++, which must come through torch as they are.
refused = ""
try:
    torch.ops.recstore.emb_read(torch.tensor([1]), -1)
except RuntimeError as error:
    refused = str(error)
assert "got -1" in refused, f"a negative dim: {refused}"
print(f"recstore-ops {recstore_ops.__version__} on torch {torch.__version__}: {rows} rows, loss {losses[-1]:.3f}")
