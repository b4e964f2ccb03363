"""A run on rows in groups, and the figures of each group alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from saved_runs import run_train
from training_runs import drop_tables

from recstore_ops.training import load
from recstore_ops.training.metrics.evaluation import Evaluation, Scores
from recstore_ops.training.metrics.retrieval import ranking_at

OPTIONS = ("--model", "fm", "--epochs", 2, "--batch-size", 64, "--dim", 4)


def sessions(rows: int, seed: int = 0) -> dict[str, Any]:
    """Rows whose labels depend on the item."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 9, rows)
    return {
        "label": (rng.random(rows) < item / 9).astype(np.int64),
        "item": item,
        "session": [f"s{number}" for number in rng.integers(0, 30, rows)],
        "shop": rng.integers(0, 4, rows),
    }


def train_grouped(folder: Path) -> None:
    """Makes `train.parquet` and `test.parquet` in a folder, and the run `grouped` on them."""
    for name, seed in (("train", 0), ("test", 1)):
        pq.write_table(pa.table(sessions(600, seed)), folder / f"{name}.parquet")
    options = ("train.parquet", "--test", "test.parquet", *OPTIONS, "--column", "session=group")
    assert run_train(folder, (*options, "--run-name", "grouped")) == (0, "")


def figures_of_sessions(folder: Path) -> dict[str, dict[str, float]]:
    """Returns the figures of each session of the test rows by the run of `train_grouped`."""
    loaded = load(folder / "runs" / "grouped")
    rows = loaded.open_rows([folder / "test.parquet"])
    logits = torch.cat([scores.logits for scores in loaded.scores(rows)]).numpy()
    drop_tables("fm")
    columns = sessions(600, 1)
    return _by_hand(columns["label"], logits, columns["session"])


def _by_hand(labels: np.ndarray, logits: np.ndarray, groups: list[str]) -> dict[str, dict[str, float]]:
    """Figures of each group by what is there for whole parts and for rankings."""
    found = {}
    for group in set(groups):
        own = np.array([each == group for each in groups])
        scores = Scores(torch.from_numpy(labels[own]).float(), torch.from_numpy(logits[own]))
        whole = Evaluation.of(scores)
        relevant = torch.from_numpy(np.flatnonzero(labels[own]))
        ndcg = math.nan
        if len(relevant):
            ndcg = ranking_at(10, torch.from_numpy(logits[own])[None], relevant, torch.tensor([0, len(relevant)])).ndcg
        found[group] = {
            "rows": whole.rows,
            "positives": whole.positives,
            "positive_share": whole.positives / whole.rows,
            "mean_prediction": float(scores.probabilities().mean()),
            "logloss": whole.logloss,
            "auc": whole.auc,
            "ndcg_at_10": ndcg,
        }
    return found
