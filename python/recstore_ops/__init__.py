"""An embedding store for PyTorch: tables that grow by id, kept and trained by a Rust core."""

from recstore_ops import _require_torch  # noqa: F401  isort: skip


from recstore_ops import checkpoint
from recstore_ops._native import __version__, table_names
from recstore_ops._table import Table, default_table
from recstore_ops.autograd import merge_gradients, set_merge
from recstore_ops.checkpoint_report import inspect_checkpoint
from recstore_ops.client import (
    EmbeddingTableConfig,
    KVClient,
    RecStoreClient,
    get_kv_client,
    memory_in_use,
    set_memory_limit,
    table_statistics,
)
from recstore_ops.collection_config import EmbeddingBagConfig, EmbeddingConfig
from recstore_ops.config import TableConfig
from recstore_ops.config_file import active_config, load_config_file
from recstore_ops.dist_embedding import DistEmbedding
from recstore_ops.dist_tensor import DistTensor
from recstore_ops.embedding_bag import DistEmbeddingBag
from recstore_ops.embedding_bag_collection import RecStoreEmbeddingBagCollection
from recstore_ops.embedding_collection import RecStoreEmbeddingCollection
from recstore_ops.functional import embedding, embedding_bag
from recstore_ops.hashtable import HashTable, HashTableRegister
from recstore_ops.inspect import inspect_table
from recstore_ops.kv_worker import KVWorker
from recstore_ops.optimizer import SparseOptimizer
from recstore_ops.prefetch import PrefetchingDataLoader
from recstore_ops.request_queue import KVResponse
from recstore_ops.servers import current_ps_backend, set_ps_backend, set_ps_config, set_ps_servers
from recstore_ops.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recstore_ops.workers import leave_ps_workers, ps_barrier, ps_workers

__all__ = [
    "DistEmbedding",
    "DistEmbeddingBag",
    "DistTensor",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "EmbeddingTableConfig",
    "HashTable",
    "HashTableRegister",
    "JaggedTensor",
    "KVClient",
    "KVResponse",
    "KVWorker",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PrefetchingDataLoader",
    "RecStoreClient",
    "RecStoreEmbeddingBagCollection",
    "RecStoreEmbeddingCollection",
    "SparseOptimizer",
    "Table",
    "TableConfig",
    "__version__",
    "active_config",
    "checkpoint",
    "current_ps_backend",
    "default_table",
    "embedding",
    "embedding_bag",
    "get_kv_client",
    "inspect_checkpoint",
    "inspect_table",
    "leave_ps_workers",
    "load_config_file",
    "memory_in_use",
    "merge_gradients",
    "ps_barrier",
    "ps_workers",
    "set_memory_limit",
    "set_merge",
    "set_ps_backend",
    "set_ps_config",
    "set_ps_servers",
    "table_names",
    "table_statistics",
]
