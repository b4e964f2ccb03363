"""A worker of a test: trains one embedding on servers and tells what it saw.

Arguments of the script: the servers separated by commas, the worker's number, the number of steps, and a mode:
`plain`, or `slow` for one that is slower the higher its number.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor

import recstore_ops
from recstore_ops import DistEmbedding, SparseOptimizer

DIM = 4
NUM_IDS = 40
IDS_PER_STEP = 12


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """The ids of a worker's step, and the weights of the sum that is its loss."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    ids = torch.randint(NUM_IDS, (IDS_PER_STEP,), generator=generator)
    return ids, torch.randn(IDS_PER_STEP, DIM, generator=generator)


def embedding(name: str) -> tuple[DistEmbedding, SparseOptimizer]:
    """The model: one table, and what trains it."""
    model = DistEmbedding(NUM_IDS, DIM, name, lr=0.1, optimizer="adagrad")
    return model, SparseOptimizer(modules=[model])


def work(servers: list[str], number: int, steps: int, mode: str) -> dict[str, Any]:
    """Trains as a worker; returns all rows and the most steps that a worker was ahead."""
    torch.set_num_threads(1)
    recstore_ops.set_ps_servers(servers, worker=number)
    model, optimizer = embedding("shared")
    recstore_ops.ps_barrier("begin")
    for step in range(steps):
        ids, weights = batch(number, step)
        (model(ids) * weights).sum().backward()
        optimizer.step()
        time.sleep(0.01 * number if mode == "slow" else 0)
    recstore_ops.ps_barrier("end")
    rows = model(torch.arange(NUM_IDS)).detach()
    ahead = [shard.most_ahead for shard in recstore_ops.ps_workers()]
    recstore_ops.ps_barrier("read")
    recstore_ops.leave_ps_workers()
    return {"rows": rows.tolist(), "ahead": ahead}


if __name__ == "__main__":
    work(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
