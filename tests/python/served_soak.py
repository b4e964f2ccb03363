"""A worker that trains a table on servers for some time, and prints what it did as JSON.

Its arguments are the servers' addresses, its number, and the seconds. It prints how long each
step took until it was acknowledged, in seconds.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from recstore_ops import DistEmbedding, SparseOptimizer, set_ps_servers

TABLE, CAPACITY, DIM = "soak", 2_000, 8


def soaked_table() -> DistEmbedding:
    """Opens the table, of which rows leave again and again: ids are many more than there is room for."""
    eviction = {"capacity": CAPACITY, "policy": "lru", "interval": 50}
    return DistEmbedding(None, DIM, TABLE, optimizer="adagrad", lr=0.1, eviction=eviction)


def work(worker: int, seconds: float) -> list[float]:
    """Trains and returns how long each step took."""
    module = soaked_table()
    optimizer = SparseOptimizer(modules=[module])
    generator = torch.Generator().manual_seed(worker)
    until, took = time.monotonic() + seconds, []
    while (started := time.monotonic()) < until:
        ids = torch.randint(10 * CAPACITY, (256,), generator=generator)
        module(ids).square().sum().backward()
        optimizer.step()
        took.append(time.monotonic() - started)
    return took


if __name__ == "__main__":
    addresses, worker, seconds = sys.argv[1:]
    set_ps_servers(addresses.split(","), timeout=120.0)
    print(json.dumps(work(int(worker), float(seconds))))
