"""This package's tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from benches import ids
from benches.ids import IdKind
from benches.yardstick import EPS, INITIAL_WEIGHT, LR
from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer

emb_read = torch.ops.recstore.emb_read.table
emb_write = torch.ops.recstore.emb_write.table
emb_update = torch.ops.recstore.emb_update.table

_numbers = itertools.count()
_FILL_CHUNK = 262_144

ADAGRAD = {"kind": "adagrad", "lr": LR, "eps": EPS, "convention": "recstore"}


def new_name() -> str:
    """Returns a table name that was not used before."""
    return f"bench/{next(_numbers)}"


class RecStoreTable:
    """A `DistEmbedding` whose rows are there, with its `SparseOptimizer`; a context manager that drops the table.

    Args:
        rows: the number of rows.
        dim: elements a row.
        optimizer: kind and hyper-parameters.
        dtype: the type of the rows.
        state_dtype: that of what the rule keeps.
        memory_limit, disk: where rows lie, as in `DistEmbedding`.
        kind: that of the rows' ids, which are `benches.ids.ids_of` of their numbers.

    Raises:
        ValueError: the configuration is invalid.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        state_dtype: str = "float32",
        memory_limit: int | None = None,
        disk: Path | None = None,
        kind: IdKind = ids.SPREAD,
    ) -> None:
        self.dim = dim
        self.module = DistEmbedding(
            None,
            dim,
            new_name(),
            optimizer=optimizer or ADAGRAD,
            dtype=dtype,
            state_dtype=state_dtype,
            memory_limit=memory_limit,
            disk=disk,
        )
        self.handle = self.module.table.handle
        self._optimizer = SparseOptimizer(modules=[self.module])
        fill(self.handle, dim, ids.all_ids(rows, _FILL_CHUNK, kind))

    def lookup(self, ids_N: Tensor) -> Tensor:
        """Reads rows by the operator, without autograd."""
        return emb_read(self.handle, ids_N, self.dim)

    @property
    def output_type(self) -> torch.dtype:
        """The type of the rows that the module gives, and so of the gradients that it takes."""
        return self.module(torch.zeros(1, dtype=torch.int64)).dtype

    def step(self, ids_N: Tensor, grad_ND: Tensor) -> None:
        """Looks rows up, hands their gradients back, takes an optimizer step."""
        self.module(ids_N).backward(grad_ND)
        self._optimizer.step()

    def __enter__(self) -> RecStoreTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        RecStoreClient().drop(self.module.name)


def fill(handle: Tensor, dim: int, chunks: Iterable[Tensor]) -> None:
    """Writes a row for each id."""
    rows = torch.empty(0, dim)
    for chunk in chunks:
        if rows.shape[0] != chunk.shape[0]:
            rows = torch.full((chunk.shape[0], dim), INITIAL_WEIGHT)
        emb_write(handle, chunk, rows)
