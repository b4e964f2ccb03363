"""A whole training step of a model like DLRM: tables in the process, on one server, and on two, of the same machine.

All processes share its cores. A turn is several steps in a row: what a step leaves for the next one, such as rows that
are read ahead, then counts too.

Shape suffixes: F features, B examples, D dim, P pairs.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benches import ids
from benches.cells.servers import ServerProcess, seconds_of, served
from benches.cells.stage import Stage
from benches.competitors.recstore import ADAGRAD, emb_read, fill, new_name
from benches.measured import Figure
from benches.scale import Scale
from benches.spread import percentile
from recstore_ops import (
    KeyedJaggedTensor,
    PrefetchingDataLoader,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    set_ps_backend,
    set_ps_servers,
)
from recstore_ops.servers.metrics_text import fetch
from recstore_ops.training.models.perceptron import perceptron

CELL = "served_step"

_TABLES, _ROWS, _DIM, _EXAMPLES, _DENSE = 26, 100_000, 16, 4_096, 13
_BATCHES, _TURN, _ROUNDS, _ONE_ROW_PULLS = 16, 16, 7, 5_000


class _Batch(NamedTuple):
    """Ids, zipf-like, one a bag; dense features `[B, 13]`; labels `[B]`."""

    sparse_features: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, f"{_TABLES} tables of dim {_DIM} in the process and on servers", 1, lambda: _figures(scale))]


def _figures(scale: Scale) -> Iterator[Figure]:
    turn, rounds = (_TURN, _ROUNDS) if scale.is_full else (3, 1)
    with ExitStack() as running:
        one, two = ([running.enter_context(_served(n, of)) for n in range(of)] for of in (1, 2))
        embedded, on_one, on_two = (_Trained(scale, servers) for servers in ([], one, two))
        narrow = _Trained(scale, one, "bfloat16")
        batches = list(embedded.batches(scale))
        trips = _requests(one, lambda: _steps(on_one, cycle(batches), turn)) / turn
        pulls = _pulls(on_one, scale)
        turns = [
            *(partial(_steps, trained, cycle(batches), turn) for trained in (embedded, on_one, on_two, narrow)),
            *(partial(_steps, trained, _read_ahead(batches, trained), turn) for trained in (embedded, on_one, on_two)),
        ]
        seconds = seconds_of(rounds, turns)
    plain, prefetched = seconds[:4], seconds[4:]
    yield Figure(CELL, "step on one server, speed over that in the process", plain[0] / plain[1], "x", ">= 0.6")
    yield Figure(CELL, "step on two servers, speed over that in the process", plain[0] / plain[2], "x")
    yield Figure(CELL, "step on one server, bfloat16, speed over that in the process", plain[0] / plain[3], "x")
    for count, step in zip(("one server", "two servers"), prefetched[1:], strict=True):
        yield Figure(CELL, f"step on {count}, read ahead, speed over that in the process", plain[0] / step, "x")
    yield Figure(CELL, "step in the process, read ahead, speed over that without", plain[0] / prefetched[0], "x")
    yield Figure(CELL, "requests to one server a step", trips, "", "<= 2")
    yield Figure(CELL, "step in the process", 1e3 * plain[0] / turn, "ms")
    yield Figure(CELL, "step on one server", 1e3 * plain[1] / turn, "ms")
    yield Figure(CELL, "step on two servers", 1e3 * plain[2] / turn, "ms")
    yield Figure(CELL, "pull of one row, median", 1e6 * percentile(pulls, 50), "us")
    yield Figure(CELL, "pull of one row, 99th percentile", 1e6 * percentile(pulls, 99), "us")


class _Trained(nn.Module):
    """Tables that are there, in the process or on servers; perceptrons over the dot products of their rows, as DLRM has
    them; and what steps both."""

    def __init__(
        self, scale: Scale, servers: list[ServerProcess], wire_dtype: Literal["float32", "bfloat16"] = "float32"
    ) -> None:
        super().__init__()
        if servers:
            set_ps_servers([server.address for server in servers], wire_dtype=wire_dtype)
        names = [new_name() for _ in range(_TABLES)]
        self.bags = RecStoreEmbeddingBagCollection(
            [
                {"name": name, "num_embeddings": None, "embedding_dim": _DIM, "feature_names": [f"f{number}"]}
                for number, name in enumerate(names)
            ],
            optimizer=ADAGRAD,
        )
        set_ps_backend("embedded")
        rows = scale.of(_ROWS)
        for module in self.bags.embedding_bags.values():
            fill(module.table.handle, _DIM, ids.all_ids(rows, rows))
        self.bottom = nn.Sequential(perceptron([_DENSE, 64, _DIM]), nn.ReLU())
        pairs = torch.triu_indices(_TABLES + 1, _TABLES + 1, offset=1)
        self.pairs = pairs[0] * (_TABLES + 1) + pairs[1]
        self.top = perceptron([self.pairs.numel() + _DIM, 64, 32, 1])
        dense = [*self.bottom.parameters(), *self.top.parameters()]
        self.optimizers = [SparseOptimizer(modules=[self.bags]), torch.optim.Adagrad(dense, lr=0.01)]

    def batches(self, scale: Scale) -> Iterator[_Batch]:
        """Batches, made before anything is timed."""
        rows, examples = scale.of(_ROWS), scale.of(_EXAMPLES)
        generator = torch.Generator().manual_seed(0)
        count = _TABLES * examples
        # Drawn together: the frequent rows of all batches are the same ones.
        for index in ids.draw(rows, count * _BATCHES, "zipf", 0).split(count):
            ids_N = ids.ids_of(index)
            lengths = torch.ones(count, dtype=torch.int64)
            features = KeyedJaggedTensor(self.bags.feature_keys, ids_N, lengths=lengths)
            dense, labels = (torch.rand(examples, width, generator=generator) for width in (_DENSE, 1))
            yield _Batch(features, dense, labels.squeeze(1).round())

    def forward(self, batch: _Batch) -> Tensor:
        """Returns logits `[B]`."""
        dense_BD = self.bottom(batch.dense)
        vectors_BFD = torch.cat([dense_BD[:, None], self.bags(batch.sparse_features)], dim=1)
        dots_BP = torch.bmm(vectors_BFD, vectors_BFD.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([dense_BD, dots_BP], dim=1)).squeeze(1)

    def step(self, batch: _Batch) -> None:
        """Forward, backward, and a step of tables and perceptrons."""
        binary_cross_entropy_with_logits(self(batch), batch.labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _read_ahead(batches: list[_Batch], trained: _Trained) -> Iterator[_Batch]:
    return iter(PrefetchingDataLoader(cycle(batches), trained.bags, prefetch_count=1))


def _steps(trained: _Trained, batches: Iterator[_Batch], count: int) -> None:
    for _ in range(count):
        trained.step(next(batches))


def _requests(servers: list[ServerProcess], work: Callable[[], object]) -> float:
    """How many requests servers carry out for `work`."""

    def carried_out() -> float:
        # `served` gives the page's URL where it was asked for one.
        addresses = [urlsplit(server.metrics or "").netloc for server in servers]
        return sum(fetch(address).total("recstore_requests_total") for address in addresses)

    before = carried_out()
    work()
    return carried_out() - before


def _pulls(trained: _Trained, scale: Scale) -> list[float]:
    """The seconds of each pull of one row."""
    table = next(iter(trained.bags.embedding_bags.values())).table
    id_N, seconds = ids.ids_of(torch.zeros(1, dtype=torch.int64)), []
    for _ in range(scale.of(_ONE_ROW_PULLS)):
        start = time.perf_counter()
        emb_read(table.handle, id_N, _DIM)
        seconds.append(time.perf_counter() - start)
    return seconds


@contextmanager
def _served(shard: int, of: int) -> Iterator[ServerProcess]:
    """A server of one of several shards in a process of its own."""
    listed = {"servers": [{"port": 1 + number, "shard": number} for number in range(of)]}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        config.write(json.dumps({"cache_ps": listed, "distributed_client": listed}))
        config.flush()
        with served("--config", config.name, "--shard", str(shard), "--metrics-port", "0") as server:
            yield server
