"""A worker that trains a table on servers for some time."""

from __future__ import annotations

import time

import torch

from recstore_ops import DistEmbedding, SparseOptimizer, set_ps_servers

TABLE, CAPACITY, DIM = "soak", 2_000, 8
LEAST_STEPS = 100
"""On a busy machine a short soak goes on until so many were made."""


def soaked_table() -> DistEmbedding:
    """Opens the table, of which rows leave again and again: ids are many more than there is room for."""
    eviction = {"capacity": CAPACITY, "policy": "lru", "interval": 50}
    return DistEmbedding(None, DIM, TABLE, optimizer="adagrad", lr=0.1, eviction=eviction)


def work(addresses: list[str], worker: int, seconds: float) -> list[float]:
    """Trains on servers and returns how long each step took until it was acknowledged, in seconds."""
    torch.set_num_threads(1)
    set_ps_servers(addresses, timeout=120.0)
    module = soaked_table()
    optimizer = SparseOptimizer(modules=[module])
    generator = torch.Generator().manual_seed(worker)
    until, took = time.monotonic() + seconds, []
    while (started := time.monotonic()) < until or len(took) < LEAST_STEPS:
        ids = torch.randint(10 * CAPACITY, (1024,), generator=generator)
        module(ids).square().sum().backward()
        optimizer.step()
        took.append(time.monotonic() - started)
    return took
