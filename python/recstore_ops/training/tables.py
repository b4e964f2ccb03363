"""What holds a model's tables: this package's store, or `torch.nn.Embedding` to compare with.

Models ask for their tables by name and take either. Both start with the same initial rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recstore_ops import DistEmbedding, RecStoreClient
from recstore_ops.training.rows.batch import Batch


class Tables(Protocol):
    """Makes the tables of a model."""

    def __call__(self, name: str, dim: int, std: float = 0.0) -> nn.Module:
        """Returns a module that reads ids int64 [N] to rows [N, dim].

        Rows start normal with mean zero and standard deviation `std`; at zero without it.
        """
        ...


class StoreTables:
    """Tables of the store, named `<prefix>/<name>`.

    Args:
        prefix: initial values depend on the table's name, and so on the prefix.
        optimizer: kind and hyper-parameters of all tables, as in `DistEmbedding`.
        num_embeddings: None for an open vocabulary: any int64 is an id, and prediction gives an unknown one no row.
        seed: of the initial values.
        dtype: the type rows are kept in, as in `DistEmbedding`.
        admission: which ids get a row, as in `DistEmbedding`.
        eviction: which rows leave, as in `DistEmbedding`.
        memory_limit: the most bytes of memory that each table may take, as in `DistEmbedding`.
        disk: a directory for the rows that the limit leaves no room for, as in `DistEmbedding`.
        process_group: the processes over which tables are sharded, as in `DistEmbedding`.
    """

    def __init__(
        self,
        prefix: str,
        optimizer: str | dict[str, Any],
        *,
        num_embeddings: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        admission: dict[str, Any] | None = None,
        eviction: dict[str, Any] | None = None,
        memory_limit: int | None = None,
        disk: str | PathLike[str] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._prefix = prefix
        self._optimizer = optimizer
        self._num_embeddings = num_embeddings
        self._seed = seed
        self._dtype = dtype
        self._admission = admission
        self._eviction = eviction
        self._memory_limit = memory_limit
        self._disk = disk
        self._process_group = process_group

    def __call__(self, name: str, dim: int, std: float = 0.0) -> DistEmbedding:
        return DistEmbedding(
            self._num_embeddings,
            dim,
            f"{self._prefix}/{name}",
            optimizer=self._optimizer,
            initializer={"kind": "normal", "std": std} if std > 0 else {"kind": "zeros"},
            seed=self._seed,
            dtype=self._dtype,
            admission=self._admission,
            eviction=self._eviction,
            memory_limit=self._memory_limit,
            disk=self._disk,
            process_group=self._process_group,
        )


class NnTables:
    """`torch.nn.Embedding(sparse=True)`, a row for each id of a vocabulary, with the initial rows of `StoreTables`.

    Args:
        vocabulary: int64 [V], the ids; a model is given their places in it, from `Vocabulary.places`.
        prefix, seed: as in `StoreTables`.
    """

    def __init__(self, vocabulary: Tensor, prefix: str, *, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._prefix = prefix
        self._seed = seed

    def __call__(self, name: str, dim: int, std: float = 0.0) -> nn.Embedding:
        # A read gives no id a row, so the table that lends its initial rows stays empty.
        lender = StoreTables(self._prefix, "sgd", seed=self._seed)(name, dim, std)
        with torch.no_grad():
            rows_VD = lender(self._vocabulary)
        RecStoreClient().drop(lender.name)
        return nn.Embedding.from_pretrained(rows_VD, freeze=False, sparse=True)


class Vocabulary:
    """The distinct ids of some rows, which `torch.nn.Embedding` needs to know beforehand.

    Attributes:
        ids: int64 [V], ascending.
    """

    def __init__(self, blocks: Iterable[Batch]) -> None:
        ids = np.empty(0, dtype=np.int64)
        pending: list[np.ndarray] = []
        for block in blocks:
            pending.append(np.unique(block.ids.numpy()))
            # Merged now and then, so that memory holds the vocabulary and not every block's.
            if sum(part.size for part in pending) > max(ids.size, 1_000_000):
                ids, pending = np.unique(np.concatenate([ids, *pending])), []
        self.ids = torch.from_numpy(np.unique(np.concatenate([ids, *pending])))

    def __len__(self) -> int:
        return self.ids.numel()

    def places(self, ids: Tensor) -> Tensor:
        """Returns the place of each id, which must be there, in the vocabulary: int64 [N] -> int64 [N]."""
        return torch.searchsorted(self.ids, ids)
