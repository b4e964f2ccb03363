"""What checkers of types say of a user's program: six mistakes are found, and none where there is none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("test")

RIGHT = """
import torch
from recstore_ops import DistEmbedding, DistEmbeddingBag, KeyedJaggedTensor, RecStoreEmbeddingBagCollection
from recstore_ops import SparseOptimizer, checkpoint

user = DistEmbedding(None, 16, "user", optimizer={"kind": "adagrad", "lr": 0.05})
bags = DistEmbeddingBag(1000, 16, "item", mode="sum", padding_idx=0)
collection = RecStoreEmbeddingBagCollection(
    [{"name": "shop", "num_embeddings": None, "embedding_dim": 8, "feature_names": ["shop"]}]
)
optimizer = SparseOptimizer(modules=[user, bags, collection])
rows: torch.Tensor = user.rows()
saved: int = checkpoint.save("saved").rows
dim: int = user.embedding_dim
"""

WRONG = [
    'DistEmbedding(None, "16", "user")',
    "DistEmbedding(None, 16)",
    'DistEmbedding(None, 16, "user", optimiser="adam")',
    'DistEmbeddingBag(None, 16, "user", mode="average")',
    "user.tabel_names()",
    "name: int = user.name",
]
"""A mistake each: a type, a missing argument, an option's name, a mode, a method, an attribute's type."""


def program(folder: Path) -> tuple[Path, set[int]]:
    """A program with all mistakes, and their lines."""
    path = folder / "user_program.py"
    path.write_text(RIGHT + "\n".join(WRONG) + "\n", encoding="utf-8")
    first = RIGHT.count("\n") + 1
    return path, set(range(first, first + len(WRONG)))


def test_pyright_finds_all_mistakes(tmp_path: Path) -> None:
    path, expected = program(tmp_path)
    checker = [str(Path(sys.executable).with_name("pyright")), "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*checker, path], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"} == expected, found


@pytest.mark.tier("all")
def test_mypy_finds_all_mistakes(tmp_path: Path) -> None:
    path, expected = program(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-color-output", path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
    )
    of_program = re.findall(rf"^{path.name}:(\d+): error: ", done.stdout, re.MULTILINE)
    assert set(map(int, of_program)) == expected, done.stdout + done.stderr
