"""`RecStoreEmbeddingCollection`: the sparse features of a batch, each id with its row of a table that grows by id."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Proxy
from typing_extensions import Unpack

from recstore_ops.config.collection_config import EmbeddingConfig
from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import DEFAULT_LR, DEFAULTS, TableOptions
from recstore_ops.nn.dist_embedding import DistEmbedding
from recstore_ops.nn.scripted import batch_of_outputs, refuse_gradients, rows_by_name
from recstore_ops.nn.table_collection import TableCollection
from recstore_ops.sharding.pooling import spread_rows
from recstore_ops.sharding.rows import Request, failing_together, sharded_rows
from recstore_ops.sparse import JaggedTensor, KeyedJaggedTensor
from recstore_ops.sparse._torchrec import Batch, Feature, type_beside
from recstore_ops.table.checks import check_ids


class RecStoreEmbeddingCollection(TableCollection[EmbeddingConfig, DistEmbedding]):
    """Tables, and the features that look up rows in them, without pooling.

    The gradients that `backward` collects are applied by `SparseOptimizer.step`: one step per distinct id, however
    many features share a table. `torch.compile(fullgraph=True)` needs `torch._dynamo.config.capture_scalar_outputs`,
    for the sizes of the outputs are data.

    Args:
        embedding_configs: the tables: `EmbeddingConfig`, dicts of its fields, or TorchRec's type of the name.
        lr: the learning rate of the tables whose `optimizer` has none; 0.01 by default.
        ps_host: the address of a parameter server, where the tables are opened, and all after them; see
            `recstore_ops.servers`.
        ps_port: its port.
        device: the device of the module, as `to` sets it; rows do not move.
        need_indices: whether outputs have the ids as their weights, in the place of those of the batch.
        **options: see `recstore_ops.TableOptions`, for the tables that have no such option of their own. With a
            `process_group` a batch is one exchange for all tables.

    Raises:
        TypeError: a description of a table of another type, or an option of another name.
        ValueError: no tables, a name twice, an invalid table, or a server's address.
        RuntimeError: a job of several processes has no `process_group`, so each process would train its own copy; or
            another rank could not make its tables.
    """

    __module__ = "recstore_ops"

    @takes(TableOptions, DEFAULTS)
    def __init__(
        self,
        embedding_configs: Sequence[Any],
        lr: float = DEFAULT_LR,
        ps_host: str | None = None,
        ps_port: int | None = None,
        *,
        device: torch.device | str | None = None,
        need_indices: bool = False,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__(EmbeddingConfig, embedding_configs, _open_table, lr, ps_host, ps_port, options, device)
        self._embedding_configs = self._configs
        self._need_indices = need_indices

    def forward(self, features: Batch) -> dict[str, Feature]:
        """Reads the row of every id.

        Args:
            features: a `KeyedJaggedTensor` of int64 ids, ours or TorchRec's, with the features of this collection
                in any order.

        Returns:
            For each feature a `JaggedTensor` of rows, `[ids of the feature, dim]`, with the batch's lengths and its
            weights if it has any. With `need_indices` the ids take the place of the weights. For TorchRec's batch it is
            TorchRec's type. A feature that looks up several tables comes as `feature@table`.

        Raises:
            TypeError: something else than a batch, or ids of another type.
            ValueError: features are missing or there are others.
            IndexError: an id out of its table's `num_embeddings`.
        """
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            return self._scripted(features)
        else:
            is_symbolic = isinstance(features, Proxy)
            return cast(Any, self._recorded(features)) if is_symbolic else self._eager(features)

    def _eager(self, features: Any) -> dict[str, Any]:
        """`forward` outside of TorchScript."""
        values = self._sharded_rows(features) if self._tables[0].is_sharded else self._rows(features)
        parts = self._checked(features).to_dict()
        jagged = type_beside(features, "JaggedTensor")
        rows = {}
        for output, each in zip(self._outputs, values, strict=True):
            part = parts[output.feature]
            weights = part.values() if self._need_indices else part.weights_or_none()
            rows[output.name] = jagged(values=each, weights=weights, lengths=part.lengths())
        return rows

    def _scripted(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """`forward` as `torch.jit.script` compiles it."""
        refuse_gradients(self._program_is_trained)
        batch = batch_of_outputs(features, self._program_features)
        return rows_by_name(
            batch, self._program_tables, self._program_dims, self._program_names, self._program_needs_indices
        )

    def __prepare_scriptable__(self) -> Any:
        """Sets the attributes that programs read, and gives itself to `torch.jit.script`."""
        self._prepare_program()
        self._program_needs_indices = self._need_indices
        return self

    def requests(self, features: Any) -> list[Request]:
        """The lookups in sharded tables that a forward of these features makes, for `ShardedPipeline`."""
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
        """The configurations of the tables."""
        return self._embedding_configs

    def need_indices(self) -> bool:
        """Whether outputs have the ids as their weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Elements a row of the first table; TorchRec's collection has one number for all."""
        return self._embedding_configs[0].embedding_dim

    @property
    def embeddings(self) -> dict[str, DistEmbedding]:
        """The module of each table by its name; `embeddings[name].weight` reads and writes rows."""
        return self._by_name()


def _open_table(config: EmbeddingConfig, lr: float, options: TableOptions) -> DistEmbedding:
    init_func = None if config.init_fn is None else config.first_rows
    return DistEmbedding(config.num_embeddings, config.embedding_dim, config.name, init_func, lr, **options)
