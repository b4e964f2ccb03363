"""The names and arguments that RecStore's and RecIS's documents use are there."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import recstore_ops
from recstore_ops import autograd

pytestmark = pytest.mark.tier("quick")

COLLECTION = recstore_ops.RecStoreEmbeddingBagCollection
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (COLLECTION, "embedding_bag_configs lr enable_fusion fusion_k ps_host ps_port"),
    (COLLECTION.issue_fused_prefetch, "features record_handle"),
    (
        COLLECTION.set_fused_prefetch_handle,
        "handle num_ids issue_ts record_stats fused_ids_cpu fused_inverse",
    ),
    (COLLECTION.embedding_bag_configs, ""),
    (COLLECTION.reset_trace, ""),
    (recstore_ops.EmbeddingBagConfig, "name num_embeddings embedding_dim feature_names"),
    (recstore_ops.DistEmbedding, "num_embeddings embedding_dim name init_func lr"),
    (recstore_ops.DistEmbedding.reset_trace, ""),
    (recstore_ops.DistTensor, "shape dtype name init_func persistent is_gdata"),
    (recstore_ops.SparseOptimizer, "kv_client lr"),
    (recstore_ops.SparseOptimizer.step, "modules"),
    (recstore_ops.SparseOptimizer._apply_gradients, "module"),
    (recstore_ops.KVClient.init_embedding_table, "name config"),
    (recstore_ops.KVClient.pull, "name ids"),
    (recstore_ops.KVClient.push, "name ids data"),
    (recstore_ops.KVClient.update, "name ids grads"),
    (recstore_ops.KVClient.prefetch, "ids"),
    (recstore_ops.HashTable, "embedding_shape name block_size dtype initializer"),
    (recstore_ops.HashTable.accept_grad, "ids"),
    (recstore_ops.HashTableRegister.register, "name"),
]


@pytest.mark.parametrize(("function", "arguments"), SIGNATURES)
def test_documented_arguments_are_taken_under_their_names(function: Callable[..., Any], arguments: str) -> None:
    assert set(arguments.split()) <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "name",
    [
        "_DistEmbFunction",
        "_RecStoreEBCFunction",
        "HashTableLookupFunction",
        "HashTableLookupHelpFunction",
        "GradWorkerMeanFunction",
        "merge_gradients",
        "set_merge",
    ],
)
def test_documented_functions_are_in_autograd(name: str) -> None:
    assert hasattr(autograd, name)


def test_documented_members_of_a_collection_are_there() -> None:
    bags = COLLECTION([{"name": "members", "num_embeddings": 9, "embedding_dim": 2, "feature_names": ["f"]}])
    documented = {
        "_embedding_bag_configs",
        "kv_client",
        "feature_keys",
        "_config_names",
        "_trace",
        "_prefetch_handles",
        "_fused_prefetch_handle",
    }
    assert documented <= set(dir(bags))
