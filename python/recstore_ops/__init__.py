"""An embedding store for PyTorch: tables that grow by id, kept and trained by a Rust core."""

from recstore_ops.ops import require_torch  # noqa: F401  isort: skip

import importlib
from typing import TYPE_CHECKING, Any

# What a program that was exported needs: the operators, their gradients, and the classes that it may take.
from recstore_ops import autograd, servers, sparse  # noqa: F401
from recstore_ops._native import __version__

if TYPE_CHECKING:
    from recstore_ops import checkpoint
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
    from recstore_ops.client.kv_worker import KVResponse, KVWorker
    from recstore_ops.config.collection_config import EmbeddingBagConfig, EmbeddingConfig
    from recstore_ops.config.config_file import active_config, load_config_file
    from recstore_ops.config.table_config import TableConfig
    from recstore_ops.config.table_options import TableOptions
    from recstore_ops.forgetting import ForgetReport, forget
    from recstore_ops.inspect.checkpoint_report import inspect_checkpoint
    from recstore_ops.inspect.table_report import inspect_table
    from recstore_ops.ngrams.compression import compress_tokens
    from recstore_ops.ngrams.deepseek import DeepSeekNGrams
    from recstore_ops.ngrams.longcat import LongCatNGrams
    from recstore_ops.ngrams.qwen import QwenNGrams
    from recstore_ops.ngrams.salted import SaltedNGrams
    from recstore_ops.ngrams.scheme import NGramScheme
    from recstore_ops.ngrams.xor import XorNGrams
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
    from recstore_ops.ops.feature_hashing import bucket_ids, cross_ids, hash_strings, ngram_ids, prefix_ids
    from recstore_ops.servers.choosing import current_ps_backend, set_ps_backend, set_ps_config, set_ps_servers
    from recstore_ops.servers.server_config import Tls
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
    from recstore_ops.table.copying import opening_empty_tables
    from recstore_ops.table.table import Table, default_table
    from recstore_ops.table.update_rule import UpdateRule, register_rule
    from recstore_ops.transfer.replacing import ReplacedEmbeddings, replace_embeddings
    from recstore_ops.transfer.restoring import restore_embeddings

__all__ = [
    "Bundle",
    "DeepSeekNGrams",
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
    "LongCatNGrams",
    "NGramMemory",
    "NGramScheme",
    "PrefetchingDataLoader",
    "Publisher",
    "PublisherAddress",
    "QwenNGrams",
    "RecStoreClient",
    "RecStoreEmbeddingBagCollection",
    "RecStoreEmbeddingCollection",
    "ReplacedEmbeddings",
    "SaltedNGrams",
    "SparseOptimizer",
    "StagedRows",
    "StagingDataLoader",
    "Table",
    "TableConfig",
    "TableOptions",
    "Tls",
    "UpdateRule",
    "XorNGrams",
    "__version__",
    "active_config",
    "averaged",
    "bucket_ids",
    "checkpoint",
    "compress_tokens",
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

# Where a public name comes from, once it is first asked for.
_HOMES = {
    "Bundle": "serving",
    "DeepSeekNGrams": "ngrams.deepseek",
    "DistEmbedding": "nn.dist_embedding",
    "DistEmbeddingBag": "nn.embedding_bag",
    "DistTensor": "client.dist_tensor",
    "EmbeddingBagConfig": "config.collection_config",
    "EmbeddingConfig": "config.collection_config",
    "EmbeddingTableConfig": "client.client",
    "FollowingBundle": "serving",
    "ForgetReport": "forgetting",
    "FrozenTable": "serving",
    "HashTable": "nn.hashtable",
    "HashTableRegister": "nn.hashtable",
    "JaggedTensor": "sparse",
    "KVClient": "client.client",
    "KVResponse": "client.kv_worker",
    "KVWorker": "client.kv_worker",
    "KeyedJaggedTensor": "sparse",
    "KeyedTensor": "sparse",
    "LongCatNGrams": "ngrams.longcat",
    "NGramMemory": "nn.ngram_memory",
    "NGramScheme": "ngrams.scheme",
    "PrefetchingDataLoader": "nn.prefetch",
    "Publisher": "serving",
    "PublisherAddress": "serving",
    "QwenNGrams": "ngrams.qwen",
    "RecStoreClient": "client.client",
    "RecStoreEmbeddingBagCollection": "nn.embedding_bag_collection",
    "RecStoreEmbeddingCollection": "nn.embedding_collection",
    "ReplacedEmbeddings": "transfer.replacing",
    "SaltedNGrams": "ngrams.salted",
    "SparseOptimizer": "nn.optimizer",
    "StagedRows": "nn.staging",
    "StagingDataLoader": "nn.staging",
    "Table": "table.table",
    "TableConfig": "config.table_config",
    "TableOptions": "config.table_options",
    "Tls": "servers.server_config",
    "UpdateRule": "table.update_rule",
    "XorNGrams": "ngrams.xor",
    "active_config": "config.config_file",
    "averaged": "nn.averaged",
    "bucket_ids": "ops.feature_hashing",
    "compress_tokens": "ngrams.compression",
    "cross_ids": "ops.feature_hashing",
    "current_ps_backend": "servers.choosing",
    "default_table": "table.table",
    "embedding": "nn.functional",
    "embedding_bag": "nn.functional",
    "export": "serving",
    "forget": "forgetting",
    "freeze": "serving",
    "get_kv_client": "client.client",
    "hash_strings": "ops.feature_hashing",
    "inspect_checkpoint": "inspect.checkpoint_report",
    "inspect_table": "inspect.table_report",
    "leave_ps_workers": "servers.workers",
    "load_bundle": "serving",
    "load_config_file": "config.config_file",
    "memory_in_use": "client.client",
    "merge_gradients": "autograd",
    "ngram_ids": "ops.feature_hashing",
    "opening_empty_tables": "table.copying",
    "prefix_ids": "ops.feature_hashing",
    "ps_barrier": "servers.workers",
    "ps_workers": "servers.workers",
    "publish": "serving",
    "register_rule": "table.update_rule",
    "replace_embeddings": "transfer.replacing",
    "restore_embeddings": "transfer.restoring",
    "set_memory_limit": "client.client",
    "set_merge": "autograd",
    "set_ps_backend": "servers.choosing",
    "set_ps_config": "servers.choosing",
    "set_ps_servers": "servers.choosing",
    "table_names": "servers.store",
    "table_statistics": "client.client",
}


if not TYPE_CHECKING:  # To a checker of types a name that is not there is an error.

    def __getattr__(name: str) -> Any:
        """Imports a public name, or a room of the package."""
        home = _HOMES.get(name)
        try:
            found = importlib.import_module(f"{__name__}.{home or name}")
        except ModuleNotFoundError as error:
            if home or error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        globals()[name] = getattr(found, name) if home else found
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
