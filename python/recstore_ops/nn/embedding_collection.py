"""`RecStoreEmbeddingCollection`: the sparse features of a batch, each id with its row of a table that grows by id."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recstore_ops.config.collection_config import EmbeddingConfig, read_configs
from recstore_ops.nn.dist_embedding import DistEmbedding
from recstore_ops.nn.table_collection import TableCollection
from recstore_ops.servers.choosing import use_constructor_address
from recstore_ops.sharding.pooling import spread_rows
from recstore_ops.sharding.rows import Request, failing_together, sharded_rows
from recstore_ops.sparse._torchrec import type_beside
from recstore_ops.table.checks import check_ids
from recstore_ops.table.shard import GradReduce, Shard
from recstore_ops.table.table import disagreeing_on_error


class RecStoreEmbeddingCollection(TableCollection[DistEmbedding]):
    """Tables, and the features that look up rows in them, without pooling.

    The gradients that `backward` collects are applied by `SparseOptimizer.step`: one step per distinct id, however
    many features share a table. `torch.compile(fullgraph=True)` needs `torch._dynamo.config.capture_scalar_outputs`,
    for the sizes of the outputs are data.

    Args:
        embedding_configs: the tables: `EmbeddingConfig`, dicts of its fields, or TorchRec's type of the name.
        lr: the learning rate of the tables whose `optimizer` has none.
        ps_host: the address of a parameter server, where the tables are opened, and all after them; see
            `recstore_ops.servers`.
        ps_port: its port.
        optimizer: kind, or kind and hyper-parameters, of the tables without one of their own; SGD by default.
        initializer: the same for initial values; normal with a standard deviation of 0.01 by default.
        dtype: the type of the rows of all tables, as in `DistEmbedding`, and so are `seed`, `block_size` and
            `nan_policy`; what is left out is taken from the configuration file, as there.
        seed: together with a table's name it seeds the initial values.
        block_size: rows in one block of storage.
        nan_policy: what happens to NaN and infinity in gradients: `error`, `skip` or `allow`.
        admission: which ids get a row by training, of the tables without an `admission` of their own.
        eviction: which rows leave, of the tables without an `eviction` of their own.
        process_group: the ranks over which the tables are sharded, as in `DistEmbedding`, and so are `grad_reduce` and
            `wire_dtype`; a batch is then one exchange for all tables.
        grad_reduce: whether gradients of the ranks are averaged, `mean`, or summed, `sum`.
        wire_dtype: the type in which rows and gradients travel.

    Raises:
        TypeError: a description of a table of another type.
        ValueError: no tables, a name twice, an invalid table, or a server's address.
        RuntimeError: in a job of several processes, where each would train a copy of its own, without a
            `process_group`; or another rank could not make its tables.
    """

    def __init__(
        self,
        embedding_configs: Sequence[Any],
        lr: float = 0.01,
        ps_host: str | None = None,
        ps_port: int | None = None,
        *,
        optimizer: str | dict[str, Any] | None = None,
        initializer: str | dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        block_size: int | None = None,
        nan_policy: str | None = None,
        admission: dict[str, Any] | None = None,
        eviction: dict[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        grad_reduce: GradReduce = "mean",
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        with disagreeing_on_error(Shard.of(process_group, grad_reduce, wire_dtype)):
            use_constructor_address(ps_host, ps_port)
            configs = read_configs(embedding_configs, EmbeddingConfig)
        modules = [
            DistEmbedding(
                config.num_embeddings,
                config.embedding_dim,
                config.name,
                lr=lr,
                optimizer=config.optimizer or optimizer,
                initializer=config.initializer or initializer,
                dtype=dtype,
                seed=seed,
                block_size=block_size,
                nan_policy=nan_policy,
                admission=config.admission or admission,
                eviction=config.eviction or eviction,
                memory_limit=config.memory_limit,
                disk=config.disk,
                process_group=process_group,
                grad_reduce=grad_reduce,
                wire_dtype=wire_dtype,
            )
            for config in configs
        ]
        super().__init__(configs, modules)
        self._embedding_configs = configs

    def forward(self, features: Any) -> dict[str, Any]:
        """Reads the row of every id.

        Args:
            features: a `KeyedJaggedTensor` of int64 ids, ours or TorchRec's, with the features of this collection
                in any order.

        Returns:
            For each feature a `JaggedTensor` of rows, `[ids of the feature, dim]`, with the batch's lengths, and its
            weights where it has any; TorchRec's for TorchRec's batch. A feature that looks up several tables comes
            as `feature@table`.

        Raises:
            TypeError: something else than a batch, or ids of another type.
            ValueError: features are missing or there are others.
            IndexError: an id out of its table's `num_embeddings`.
        """
        values = self._sharded_rows(features) if self._is_sharded() else self._rows(features)
        parts = self._checked(features).to_dict()
        jagged = type_beside(features, "JaggedTensor")
        rows = {}
        for output, each in zip(self._outputs, values, strict=True):
            part = parts[output.feature]
            rows[output.name] = jagged(values=each, weights=part.weights_or_none(), lengths=part.lengths())
        return rows

    def requests(self, features: Any) -> list[Request]:
        """What a forward of these features looks up in sharded tables, for `ShardedPipeline`."""
        parts = self._checked(features).to_dict()
        tables = zip(self._outputs, self._tables_of(self._outputs), strict=True)
        return [Request(table, check_ids(parts[output.feature].values())) for output, table in tables]

    def _rows(self, features: Any) -> list[Tensor]:
        """The rows of each output, one lookup each."""
        parts = self._checked(features).to_dict()
        modules = zip(self._outputs, self._modules_of(self._outputs), strict=True)
        return [module(parts[output.feature].values()) for output, module in modules]

    def _sharded_rows(self, features: Any) -> list[Tensor]:
        """The rows of each output, one exchange for all."""
        with failing_together(self.tables()):
            requests = self.requests(features)
        found = sharded_rows(requests)
        return [
            spread_rows(rows).to(module.output_dtype)
            for module, rows in zip(self._modules_of(self._outputs), found, strict=True)
        ]

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """What describes the tables."""
        return self._embedding_configs

    @property
    def embeddings(self) -> dict[str, DistEmbedding]:
        """The module of each table by its name; `embeddings[name].weight` reads and writes rows."""
        return self._by_name()
