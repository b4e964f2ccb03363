"""How fast `recstore train` reads Criteo's text, and trains on it.

    python benches/train_text.py [--rows 600000] [--rounds 3] [--batch 4096] [--models lr,fm,deepfm,dlrm]

One file of generated rows is read by pyarrow's CSV reader with one thread, by the reader of `recstore train` (shuffled
batches) on one core, and trained on for an epoch by each model with two threads: once with tables of the store, once
with `torch.nn.Embedding`, whose vocabulary is found beforehand. All take turns. A ratio is the median of the rounds'
ratios to pyarrow's rate.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pyarrow import csv

from recstore_ops import RecStoreClient, table_names
from recstore_ops.training.data.batch import Batch, regroup, shuffled
from recstore_ops.training.models.tables import Vocabulary
from recstore_ops.training.run.build import build_model
from recstore_ops.training.run.choices import ModelName
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.loop import train
from recstore_ops.training.run.training_input import open_input
from recstore_ops.training.synthetic.criteo import write_criteo

GOALS = {"reader": 3.0, "lr": 1.2, "fm": 0.9, "deepfm": 0.5, "dlrm": 0.3}
THREADS = 2


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.txt"
        write_criteo(path, options.rows, seed=0, model_seed=0, on_rows=lambda _: None)
        works = _works(path, options.batch, options.models)
        rates: dict[str, list[float]] = {name: [] for name in works}
        for round_number in range(options.rounds + 1):
            for name, work in works.items():
                rate = options.rows / _seconds(work)
                if round_number > 0:  # The first warms up.
                    rates[name].append(rate)
    _show(rates)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["lr", "fm", "deepfm", "dlrm"])
    return parser.parse_args()


def _works(path: Path, batch: int, models: list[ModelName]) -> dict[str, Callable[[], None]]:
    vocabulary = open_input(_config(path, batch)).vocabulary()
    works: dict[str, Callable[[], None]] = {
        "pyarrow, one thread": lambda: _read_by_arrow(path),
        "reader": lambda: _read(_config(path, batch)),
    }
    for model in models:
        works[model] = partial(_train, _config(path, batch, model))
        works[f"{model}, nn.Embedding"] = partial(_train, _config(path, batch, model, "nn"), vocabulary)
    return works


def _config(
    path: Path, batch: int, model: ModelName = "lr", tables: Literal["store", "nn"] = "store"
) -> TrainingConfig:
    return TrainingConfig(
        train=(path,),
        model=model,
        tables=tables,
        batch_size=batch,
        epochs=1,
        validation_fraction=0.0,
        cache_bytes=0,
    )


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _read_by_arrow(path: Path) -> None:
    csv.read_csv(
        path,
        read_options=csv.ReadOptions(autogenerate_column_names=True, use_threads=False),
        parse_options=csv.ParseOptions(delimiter="\t"),
    )


def _read(config: TrainingConfig) -> None:
    torch.set_num_threads(1)
    for _ in _batches(config):
        pass


def _batches(config: TrainingConfig) -> Iterator[Batch]:
    """What `recstore train` reads on a thread of its own, here on the caller's."""
    rng = np.random.default_rng([config.seed, 1])
    blocks = shuffled(open_input(config).train, config.shuffle_window, config.batch_size, rng)
    return regroup(blocks, config.batch_size)


def _train(config: TrainingConfig, vocabulary: Vocabulary | None = None) -> None:
    torch.set_num_threads(THREADS)
    rows = open_input(config)
    if vocabulary is not None:
        rows = rows.in_places_of(vocabulary)
    train(config, build_model(config, "bench", rows.train, vocabulary), rows)
    for table in table_names():
        RecStoreClient().drop(table)


def _show(rates: dict[str, list[float]]) -> None:
    arrow = rates["pyarrow, one thread"]
    print("| | rows/s | beside pyarrow | goal |\n|---|---|---|---|")
    for name, own in rates.items():
        ratio = statistics.median(rate / of_arrow for rate, of_arrow in zip(own, arrow, strict=True))
        goal = f"{GOALS[name]:g}" if name in GOALS else ""
        print(f"| {name} | {statistics.median(own):,.0f} | {ratio:.2f} | {goal} |")


if __name__ == "__main__":
    main()
