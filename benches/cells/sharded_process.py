"""`torchrun ... -m benches.cells.sharded_process ROWS BATCH STEPS [WAY]` prints, on rank 0, the seconds of steps.

The collection has four tables of one feature each; every rank has its share of the same batches. Also runs alone, with
tables that are not sharded. `WAY` takes TorchRec's collection instead, sharded in this way; `store` has one store for
all ranks in the place of shards. All rows are there before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benches.competitors import sharded_torchrec
from benches.competitors.recstore import ADAGRAD, emb_write
from benches.ids import ids_of
from recstore_ops import KeyedJaggedTensor, RecStoreEmbeddingBagCollection, SparseOptimizer
from recstore_ops.sharding import ShardedPipeline, exchange_statistics, shard_of, share_host_store
from recstore_ops.table.shard import Shard
from recstore_ops.training.run.job import joined_job

_TABLES, _DIM = 4, 64
# A gigabit per second.
_LATENCY_SECONDS, _BYTES_PER_SECOND = 1e-4, 125e6
# So many batches a pipeline takes to find out whether it pays.
_WARM_UP, _ROWS_PER_WRITE = 20, 65_536
STORE = "store"
KEYS = [f"f{number}" for number in range(_TABLES)]


def places(rows: int, batch: int, steps: int) -> list[Tensor]:
    """This rank's part of each batch: a row number for each feature and example, more often a low one."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(0)
    own = slice(batch * rank // world, batch * (rank + 1) // world)
    drawn = [(torch.rand(_TABLES, batch, generator=generator) ** 3 * rows).long() for _ in range(steps)]
    return [places_FB[:, own].contiguous() for places_FB in drawn]


def batches(parts: Iterable[Tensor]) -> list[KeyedJaggedTensor]:
    """Batches of ids, which are spread over all 64 bits."""
    ids = [ids_of(places_FB.flatten()) for places_FB in parts]
    return [KeyedJaggedTensor(KEYS, ids_N, lengths=torch.ones_like(ids_N)) for ids_N in ids]


def measured_torchrec(rows: int, batch: int, steps: int, way: str) -> dict[str, float]:
    """Seconds a step of TorchRec's collection."""
    collection, top = sharded_torchrec.sharded_collection(KEYS, rows, _DIM, way), _top()
    own = sharded_torchrec.batches(KEYS, places(rows, batch, steps + _WARM_UP))
    for part in (own[:_WARM_UP], own[_WARM_UP:]):
        started = time.perf_counter()
        for features in part:
            top(collection(features).values()).square().mean().backward()
        seconds = time.perf_counter() - started
    return {"plain": seconds / steps}


def _top() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(_TABLES * _DIM, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))


def measured_in_one_store(rows: int, batch: int, steps: int, group: Any) -> dict[str, float]:
    """Seconds a step of tables in one store that the ranks share; each rank makes its own optimizer steps."""
    share_host_store(group)
    collection = _collection(None)
    if dist.get_rank(group) == 0:
        _fill(collection, rows)
    own = batches(places(rows, batch, steps + _WARM_UP))
    top, stepper = _top(), SparseOptimizer(modules=[collection])
    dist.barrier(group)
    seconds = torch.tensor([_train(own, collection, top, stepper) / steps])
    # The slower rank decides: nothing else makes one wait for the other.
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return {"plain": float(seconds)}


def _collection(group: Any) -> RecStoreEmbeddingBagCollection:
    return RecStoreEmbeddingBagCollection(
        [{"name": key, "num_embeddings": None, "embedding_dim": _DIM, "feature_names": [key]} for key in KEYS],
        optimizer=ADAGRAD,
        process_group=group,
    )


def measured(rows: int, batch: int, steps: int, group: Any) -> dict[str, float]:
    """Seconds a step without and with an exchange ahead, and what was exchanged."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    collection = _collection(group)
    _fill(collection, rows)
    top, stepper = _top(), SparseOptimizer(modules=[collection])
    own = batches(places(rows, batch, steps + _WARM_UP))
    figures = {}
    ways: dict[str, Iterable[KeyedJaggedTensor]] = {"plain": own}
    if group is not None:
        ways["ahead"] = ShardedPipeline(own, [collection])
        ways |= {"plain over a network": own, "ahead over a network": ShardedPipeline(own, [collection])}
    for name, loader in ways.items():
        with _network() if "network" in name else nullcontext():
            figures[name] = _train(loader, collection, top, stepper) / steps
        found = exchange_statistics()
        figures[f"{name} exposed"] = found["exposed_seconds"] / steps
        if name == "plain" and world > 1:
            sent = sum(found[key] for key in ("id_bytes", "row_bytes", "gradient_bytes", "count_bytes"))
            sums = torch.tensor([sent, _fewest_bytes(own[_WARM_UP:], rank, world)], dtype=torch.float64)
            dist.all_reduce(sums)
            figures["bytes over minimum"] = float(sums[0] / sums[1])
    return figures


@contextmanager
def _network() -> Iterator[None]:
    """Exchanges wait besides as long as a network would take that joins the ranks: no core works meanwhile."""
    all_to_all = Shard.all_to_all

    def over_a_network(shard: Shard, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        foreign_bytes = max(sum(sizes) - sizes[shard.rank] for sizes in (sent_sizes, received_sizes))
        time.sleep(_LATENCY_SECONDS + foreign_bytes / _BYTES_PER_SECOND)
        return all_to_all(shard, sent, sent_sizes, received_sizes)

    with patch.object(Shard, "all_to_all", over_a_network):
        yield


def _fill(collection: RecStoreEmbeddingBagCollection, rows: int) -> None:
    ids_N = ids_of(torch.arange(rows))
    for table in collection.tables():
        own_N = ids_N if table.shard is None else ids_N[table.shard.owns(ids_N)]
        for part in own_N.split(_ROWS_PER_WRITE):
            emb_write(table.handle, part, torch.randn(part.numel(), _DIM))


def _train(loader: Iterable[Any], collection: Any, top: torch.nn.Module, stepper: SparseOptimizer) -> float:
    """Seconds of the batches behind the first ones."""
    started = 0.0
    for number, batch in enumerate(loader):
        if number == _WARM_UP:
            exchange_statistics(reset=True)
            started = time.perf_counter()
        top(collection(batch).flatten(1)).square().mean().backward()
        stepper.step()
    return time.perf_counter() - started


def _fewest_bytes(parts: list[KeyedJaggedTensor], rank: int, world: int) -> float:
    """The bytes of ids and gradients that a rank must send to their owners, and of rows that must come from them."""
    foreign = sum(
        int((shard_of(ids.unique(), world) != rank).sum())
        for part in parts
        for ids in part.values().split(part.length_per_key())
    )
    return foreign * (8 + 2 * 4 * _DIM)


def main() -> None:
    """Measures, and prints JSON on the first rank."""
    rows, batch, steps = map(int, sys.argv[1:4])
    way = sys.argv[4] if len(sys.argv) > 4 else None
    with joined_job() as job:
        if way is None:
            figures = measured(rows, batch, steps, job.group)
        elif way == STORE:
            figures = measured_in_one_store(rows, batch, steps, job.group)
        else:
            figures = measured_torchrec(rows, batch, steps, way)
        if job.is_first:
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
