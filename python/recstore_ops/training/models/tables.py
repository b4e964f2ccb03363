"""The tables of a model: in this package's store, or as `torch.nn.Embedding` to compare with.

Models ask for their tables by name and take either. Both start with the same initial rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from recstore_ops import DistEmbedding, RecStoreClient, TableOptions, table_names
from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import OnExisting, StorageOptions
from recstore_ops.servers.choosing import embedded_for
from recstore_ops.training.data.batch import Batch


class Tables(Protocol):
    """Makes the tables of a model."""

    def __call__(self, name: str, dim: int, std: float = 0.0) -> nn.Module:
        """Returns a module that reads ids int64 [N] to rows [N, dim].

        Rows start normal with mean zero and standard deviation `std`; at zero without it.
        """
        ...


_DEFAULTS: StorageOptions = {"seed": 0, "dtype": torch.float32}


class StoreTables:
    """Tables of the store, named `<prefix>/<name>`.

    Args:
        prefix: initial values depend on the table's name, and so on the prefix.
        optimizer: of all tables, as in `recstore_ops.TableOptions`, and so are `process_group` and `on_existing`.
        num_embeddings: None for an open vocabulary: any int64 is an id, and prediction gives an unknown one no row.
        **options: those of `TableOptions` that say which rows are kept, and how. Without a seed it is 0, without a type
            of rows float32, whatever a configuration file says.
    """

    @takes(StorageOptions, _DEFAULTS)
    def __init__(
        self,
        prefix: str,
        optimizer: str | dict[str, Any],
        *,
        num_embeddings: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_existing: OnExisting | None = None,
        **options: Unpack[StorageOptions],
    ) -> None:
        self._prefix = prefix
        self._num_embeddings = num_embeddings
        self._options: TableOptions = {
            **_DEFAULTS,
            **options,
            "optimizer": optimizer,
            "process_group": process_group,
            "on_existing": on_existing,
        }

    def __call__(self, name: str, dim: int, std: float = 0.0) -> DistEmbedding:
        initializer = {"kind": "normal", "std": std} if std > 0 else {"kind": "zeros"}
        options: TableOptions = {**self._options, "initializer": initializer}
        return DistEmbedding(self._num_embeddings, dim, f"{self._prefix}/{name}", **options)


class NnTables:
    """`torch.nn.Embedding(sparse=True)`, a row for each id of a vocabulary, with the initial rows of `StoreTables`.

    A call raises ValueError if this process has the table of the store that would begin so, or has chosen servers.

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
        with embedded_for("tables nn"):
            if (lent := f"{self._prefix}/{name}") in table_names():
                raise ValueError(f'tables nn begin with the rows of a new table "{lent}", and this process has one')
            lender = StoreTables(self._prefix, "sgd", seed=self._seed)(name, dim, std)
            with torch.no_grad():
                rows_VD = lender(self._vocabulary)
            RecStoreClient().drop(lent)
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
