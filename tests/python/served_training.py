"""Factorization machines that several workers train on servers."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from recstore_ops import DistEmbedding, SparseOptimizer, set_ps_servers
from recstore_ops.training import planted_interactions
from recstore_ops.training.data.batch import regroup, shuffled
from recstore_ops.training.data.row_source import MemoryRows
from recstore_ops.training.models import FactorizationMachine
from recstore_ops.training.models.tables import StoreTables

# The published settings: batches of 100 rows, whose losses are summed.
FTRL = {"kind": "ftrl", "alpha": 0.1, "beta": 1.0, "l1": 1e-5, "l2": 1e-3}
BATCH_ROWS = 100


def factorization_machine(name: str) -> FactorizationMachine:
    """Opens the tables `<name>/w` and `<name>/v`. All that is learnt is in them: there is no bias beside them."""
    return FactorizationMachine(StoreTables(name, FTRL), dim=4, init_std=0.05, bias=False)


def train(addresses: list[str], name: str, worker: int, num_workers: int, epochs: int) -> None:
    """Trains on this worker's share of the rows, on servers, and waits for no other worker."""
    torch.set_num_threads(1)
    set_ps_servers(addresses)
    model = factorization_machine(name)
    optimizer = SparseOptimizer(modules=[module for module in model.modules() if isinstance(module, DistEmbedding)])
    rows = MemoryRows(planted_interactions().train).shard(worker, num_workers)
    for epoch in range(epochs):
        own = shuffled(rows, rows.estimated_rows, BATCH_ROWS, np.random.default_rng([epoch, worker]))
        for batch in regroup(own, BATCH_ROWS):
            binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="sum").backward()
            optimizer.step()
