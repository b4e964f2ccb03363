"""`python -m benches.cells.memory_process ROWS DIM` prints by how many bytes filling a table grows the process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from benches.competitors.recstore import ADAGRAD, emb_write, new_name
from benches.ids import ids_of
from recstore_ops import DistEmbedding

_BATCH = 65_536


def growth(rows: int, dim: int) -> int:
    """Fills a table of AdaGrad in batches; what the batches themselves need was there before."""
    ids, values = ids_of(torch.arange(rows)), torch.full((_BATCH, dim), 0.01)
    _write(dim, ids[:1], values)
    module = DistEmbedding(None, dim, new_name(), optimizer=ADAGRAD)
    before = process_bytes()
    for batch in ids.split(_BATCH):
        emb_write(module.table.handle, batch, values[: len(batch)])
    return process_bytes() - before


def _write(dim: int, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Writes to another table, so that threads and code are there before memory is looked at."""
    module = DistEmbedding(None, dim, new_name(), optimizer=ADAGRAD)
    emb_write(module.table.handle, ids, values[: len(ids)])


def process_bytes() -> int:
    """Returns the bytes of resident memory, as Linux counts them."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(growth(int(sys.argv[1]), int(sys.argv[2])))
