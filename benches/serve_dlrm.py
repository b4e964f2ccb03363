"""A DLRM that answers requests in this process: as a bundle, as plain PyTorch, and as TorchRec's quantized collection.

    python benches/serve_dlrm.py [--rows 100000] [--candidates 128] [--requests 2000] [--keep DIR]

26 tables of dim 16, 13 dense features, so many candidates a request. All run on one thread and take turns, some dozens
of requests at a time. `lookups` is the model without its perceptrons: a matrix of pooled rows. `--keep` leaves the
bundles in a directory, for `benches/serve_model.py`. TorchRec is left out where it is not installed.

Shape suffixes: B candidates, F tables, D dim, J dense features.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import recstore_ops
from recstore_ops import KeyedJaggedTensor, RecStoreEmbeddingBagCollection
from recstore_ops.ops import operators
from recstore_ops.serving import EncodingName

TABLES, DIM, DENSE, HIDDEN = 26, 16, 13, 64
TURN = 25
"""Requests of one side before the next one's turn."""

ENCODINGS: tuple[EncodingName, ...] = ("float32", "int8")
KEYS = [f"table{number}" for number in range(TABLES)]

Request = tuple[Tensor, Tensor]
Side = Callable[[Tensor, Tensor], Tensor]


class OurTables(nn.Module):
    """The tables in the store."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        configs = [
            {"name": name, "num_embeddings": None, "embedding_dim": DIM, "feature_names": [name], "pooling": "sum"}
            for name in KEYS
        ]
        self.bags = RecStoreEmbeddingBagCollection(configs, optimizer="adagrad")
        for name, module in self.bags.embedding_bags.items():
            operators.emb_write(module.table.handle, torch.arange(rows), rows_of(name, rows))

    def forward(self, ids_BF: Tensor) -> Tensor:
        """Returns rows [B, F, D]."""
        lengths = torch.ones(ids_BF.numel(), dtype=torch.int64)
        return self.bags(KeyedJaggedTensor(KEYS, ids_BF.t().reshape(-1), lengths=lengths))


class TorchTables(nn.Module):
    """The tables as `nn.EmbeddingBag`."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag.from_pretrained(rows_of(name, rows), mode="sum") for name in KEYS)

    def forward(self, ids_BF: Tensor) -> Tensor:
        """Returns rows [B, F, D]."""
        return torch.stack([bag(ids_BF[:, field, None]) for field, bag in enumerate(self.bags)], dim=1)


class TorchRecTables(nn.Module):
    """The tables as TorchRec's `EmbeddingBagCollection`, quantized to int8."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torchrec, quantized = (importlib.import_module(name) for name in ("torchrec", "torchrec.quant"))
        configs = [
            torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name in KEYS
        ]
        bags = torchrec.EmbeddingBagCollection(tables=configs)
        for name, bag in bags.embedding_bags.items():
            bag.weight.data.copy_(rows_of(name, rows))
        placeholder = torch.ao.quantization.PlaceholderObserver
        bags.qconfig = torch.ao.quantization.QConfig(
            activation=placeholder.with_args(dtype=torch.float), weight=placeholder.with_args(dtype=torch.qint8)
        )
        self._bags = quantized.EmbeddingBagCollection.from_float(bags)
        self._features: Any = torchrec.KeyedJaggedTensor

    def forward(self, ids_BF: Tensor) -> Tensor:
        """Returns rows [B, F, D]."""
        lengths = torch.ones(ids_BF.numel(), dtype=torch.int32)
        pooled = self._bags(self._features(keys=KEYS, values=ids_BF.t().reshape(-1), lengths=lengths))
        return pooled.values().view(-1, TABLES, DIM)


class Dlrm(nn.Module):
    """A perceptron of dense features, products of all pairs of rows, and a perceptron above."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(DENSE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(TABLES + 1, TABLES + 1, -1))

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Returns logits [B] of ids [B, F] and dense features [B, J]."""
        bottom_BD = self.bottom(dense)
        all_BFD = torch.cat([bottom_BD.unsqueeze(1), self.tables(ids)], dim=1)
        products = torch.bmm(all_BFD, all_BFD.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom_BD, products], dim=1)).squeeze(1)


def rows_of(name: str, rows: int) -> Tensor:
    """The rows of a table, the same for every side."""
    generator = torch.Generator().manual_seed(KEYS.index(name))
    return torch.empty(rows, DIM).uniform_(-0.1, 0.1, generator=generator)


def requests_of(count: int, candidates: int, rows: int) -> list[Request]:
    """Requests with ids drawn evenly."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(rows, (candidates, TABLES), generator=generator),
            torch.rand(candidates, DENSE, generator=generator),
        )
        for _ in range(count)
    ]


def bundle_sides(model: nn.Module, request: Request, directory: Path, encoding: EncodingName) -> dict[str, Side]:
    """The model as a bundle, by its graph and compiled."""
    recstore_ops.export(model, request, directory, encoding=encoding, compiled=True)
    return {
        f"bundle, {encoding}": recstore_ops.load_bundle(directory),
        f"compiled bundle, {encoding}": recstore_ops.load_bundle(directory, compiled=True, trusted=True),
    }


def lookups_side(tables: nn.Module, ids: Tensor, directory: Path, encoding: EncodingName) -> Side:
    """The tables alone as a bundle, which takes no dense features."""
    recstore_ops.export(tables, (ids,), directory, encoding=encoding)
    bundle = recstore_ops.load_bundle(directory)
    return lambda ids, _: bundle(ids)


def sides_of(rows: int, request: Request, directory: Path) -> dict[str, Side]:
    """All that take turns, by their names."""
    ours = OurTables(rows)
    model = Dlrm(ours).eval()
    sides: dict[str, Side] = {}
    for encoding in ENCODINGS:
        sides |= bundle_sides(model, request, directory / encoding, encoding)
    sides["plain PyTorch, float32"] = Dlrm(TorchTables(rows)).eval()
    quantized: nn.Module | None = None
    try:
        quantized = TorchRecTables(rows)
    except ImportError as error:
        print(f"TorchRec is left out: {error}")
    if quantized is not None:
        sides["TorchRec, int8"] = Dlrm(quantized).eval()
    for encoding in ENCODINGS:
        sides[f"lookups of the bundle, {encoding}"] = lookups_side(
            ours, request[0], directory / f"lookups-{encoding}", encoding
        )
    if quantized is not None:
        tables = quantized
        sides["lookups of TorchRec, int8"] = lambda ids, _: tables(ids)
    return sides


def check_equal(sides: dict[str, Side], request: Request) -> None:
    """Checks that all models answer the same, but for what int8 loses."""
    expected = sides["plain PyTorch, float32"](*request)
    for name, side in sides.items():
        if not name.startswith("lookups"):
            torch.testing.assert_close(side(*request), expected, rtol=0, atol=2e-3 if "int8" in name else 1e-5)


def measured(sides: dict[str, Side], requests: Sequence[Request], count: int) -> dict[str, list[float]]:
    """The seconds of each request, by side; sides take turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for first in range(0, count, TURN):
        for name, side in sides.items():
            side(*requests[first % len(requests)])
            for number in range(first, first + TURN):
                request = requests[number % len(requests)]
                begin = time.perf_counter()
                side(*request)
                taken[name].append(time.perf_counter() - begin)
    return taken


def report(taken: dict[str, list[float]]) -> None:
    """Prints a row for each side."""
    print("| side | requests/s a core | p50, ms | p99, ms |\n|---|---|---|---|")
    for name, seconds in taken.items():
        p50, p99 = (1e3 * value for value in np.percentile(seconds, (50, 99)))
        print(f"| {name} | {1 / statistics.mean(seconds):,.0f} | {p50:.3f} | {p99:.3f} |")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--requests", type=int, default=2_000, help="of each side")
    parser.add_argument("--keep", type=Path, help="where the bundles stay")
    given = parser.parse_args()
    torch.set_num_threads(1)
    requests = requests_of(500, given.candidates, given.rows)
    kept = nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory()
    with kept as directory, torch.no_grad():
        sides = sides_of(given.rows, requests[0], Path(directory))
        check_equal(sides, requests[0])
        report(measured(sides, requests, given.requests))


if __name__ == "__main__":
    main()
