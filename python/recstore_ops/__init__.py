"""An embedding store for PyTorch: tables that grow by id, kept and trained by a Rust core."""

from recstore_ops.ops import require_torch  # noqa: F401  isort: skip


from recstore_ops import checkpoint
from recstore_ops._native import __version__
from recstore_ops.autograd import merge_gradients, set_merge
from recstore_ops.client.client import (
    EmbeddingTableConfig,
    KVClient,
    RecStoreClient,
    get_kv_client,
    memory_in_use,
    set_memory_limit,
    table_statistics,
)
from recstore_ops.client.dist_tensor import DistTensor
from recstore_ops.client.kv_worker import KVWorker
from recstore_ops.client.request_queue import KVResponse
from recstore_ops.config.collection_config import EmbeddingBagConfig, EmbeddingConfig
from recstore_ops.config.config_file import active_config, load_config_file
from recstore_ops.config.table_config import TableConfig
from recstore_ops.config.table_options import TableOptions
from recstore_ops.forgetting import ForgetReport, forget
from recstore_ops.inspect.checkpoint_report import inspect_checkpoint
from recstore_ops.inspect.table_report import inspect_table
from recstore_ops.nn.averaged import averaged
from recstore_ops.nn.dist_embedding import DistEmbedding
from recstore_ops.nn.embedding_bag import DistEmbeddingBag
from recstore_ops.nn.embedding_bag_collection import RecStoreEmbeddingBagCollection
from recstore_ops.nn.embedding_collection import RecStoreEmbeddingCollection
from recstore_ops.nn.functional import embedding, embedding_bag
from recstore_ops.nn.hashtable import HashTable, HashTableRegister
from recstore_ops.nn.ngram_memory import NGramMemory
from recstore_ops.nn.optimizer import SparseOptimizer
from recstore_ops.nn.prefetch import PrefetchingDataLoader
from recstore_ops.nn.staging import StagedRows, StagingDataLoader
from recstore_ops.ops.made_ids import bucket_ids, cross_ids, hash_strings, ngram_ids, prefix_ids
from recstore_ops.servers.choosing import current_ps_backend, set_ps_backend, set_ps_config, set_ps_servers
from recstore_ops.servers.store import table_names
from recstore_ops.servers.workers import leave_ps_workers, ps_barrier, ps_workers
from recstore_ops.serving import (
    Bundle,
    FollowingBundle,
    FrozenTable,
    Publisher,
    PublisherAddress,
    export,
    freeze,
    load_bundle,
    publish,
)
from recstore_ops.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recstore_ops.sparse.proxyable import Proxyable
from recstore_ops.table.table import Table, default_table
from recstore_ops.table.unpickling import opening_empty_tables
from recstore_ops.table.update_rule import UpdateRule, register_rule
from recstore_ops.transfer.replacing import ReplacedEmbeddings, replace_embeddings
from recstore_ops.transfer.restoring import restore_embeddings

__all__ = [
    "Bundle",
    "DistEmbedding",
    "DistEmbeddingBag",
    "DistTensor",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "EmbeddingTableConfig",
    "FollowingBundle",
    "ForgetReport",
    "FrozenTable",
    "HashTable",
    "HashTableRegister",
    "JaggedTensor",
    "KVClient",
    "KVResponse",
    "KVWorker",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "NGramMemory",
    "PrefetchingDataLoader",
    "Publisher",
    "PublisherAddress",
    "RecStoreClient",
    "RecStoreEmbeddingBagCollection",
    "RecStoreEmbeddingCollection",
    "ReplacedEmbeddings",
    "SparseOptimizer",
    "StagedRows",
    "StagingDataLoader",
    "Table",
    "TableConfig",
    "TableOptions",
    "UpdateRule",
    "__version__",
    "active_config",
    "averaged",
    "bucket_ids",
    "checkpoint",
    "cross_ids",
    "current_ps_backend",
    "default_table",
    "embedding",
    "embedding_bag",
    "export",
    "forget",
    "freeze",
    "get_kv_client",
    "hash_strings",
    "inspect_checkpoint",
    "inspect_table",
    "leave_ps_workers",
    "load_bundle",
    "load_config_file",
    "memory_in_use",
    "merge_gradients",
    "ngram_ids",
    "opening_empty_tables",
    "prefix_ids",
    "ps_barrier",
    "ps_workers",
    "publish",
    "register_rule",
    "replace_embeddings",
    "restore_embeddings",
    "set_memory_limit",
    "set_merge",
    "set_ps_backend",
    "set_ps_config",
    "set_ps_servers",
    "table_names",
    "table_statistics",
]


# What is pickled names a class by its module: a pickle must not depend on the room that the class lies in.
# Batches stay where they are written, for TorchScript, and see to their pickles themselves.
def _take_home(names: list[str], but: type) -> None:
    for name in names:
        if isinstance(public := globals()[name], type) and not isinstance(public, but):
            public.__module__ = __name__


_take_home(__all__, but=Proxyable)
del Proxyable, _take_home
