"""Writes a bundle with one release of torch, and asks it with another: the answers are equal to the bit.

    python .ci/compat_bundle.py write FOLDER
    python .ci/compat_bundle.py read FOLDER

The folder gets the bundle, what it was asked and what the model answered.
"""

from __future__ import annotations

import sys
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

import recstore_ops
from recstore_ops import DistEmbeddingBag, KeyedJaggedTensor, RecStoreEmbeddingBagCollection, SparseOptimizer

KEYS = ["user", "item"]


class Clicks(nn.Module):
    """A bag, two pooled features and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = DistEmbeddingBag(None, 8, "history", mode="mean", optimizer="adagrad")
        configs = [
            {"name": key, "num_embeddings": None, "embedding_dim": 8, "feature_names": [key], "pooling": "sum"}
            for key in KEYS
        ]
        self.features = RecStoreEmbeddingBagCollection(configs, optimizer="adagrad")
        self.dense = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, history: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """Returns logits [B] of ids [B, L] and features of B examples."""
        pooled = self.features(features).flatten(1)
        return self.dense(torch.cat([self.bag(history), pooled], dim=1)).squeeze(1)


def write(folder: Path) -> None:
    """Trains a little, and writes the bundle, the inputs and the logits."""
    model, history = Clicks(), torch.arange(48).view(16, 3) * 2**40
    lengths = torch.arange(32) % 4
    features = KeyedJaggedTensor(KEYS, torch.arange(int(lengths.sum())) - 20, lengths=lengths)
    steps = SparseOptimizer(lr=0.1, modules=model)
    for _ in range(3):
        model(history, features).square().sum().backward()
        steps.step()
    recstore_ops.export(model.eval(), (history, features), folder / "clicks.bundle")
    with torch.no_grad():
        logits = model(history, features)
    inputs = {
        "history": history,
        "features_values": features.values(),
        "features_lengths": lengths.view(2, 16).t().contiguous(),
    }
    safetensors.torch.save_file({**inputs, "logits": logits}, folder / "asked.safetensors")


def read(folder: Path) -> None:
    """Asks the bundle, and compares its answer with the model's.

    Raises:
        SystemExit: they differ.
    """
    inputs = safetensors.torch.load_file(folder / "asked.safetensors")
    expected = inputs.pop("logits")
    bundle = recstore_ops.load_bundle(folder / "clicks.bundle")
    (logits,) = bundle.flat([inputs[described["name"]] for described in bundle.manifest.inputs])
    if not torch.equal(logits, expected):
        raise SystemExit(f"torch {torch.__version__}: {folder} answers {logits}, the model {expected}")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
