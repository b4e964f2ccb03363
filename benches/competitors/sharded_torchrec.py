"""TorchRec's collection on the CPU, its tables sharded over the ranks of a job."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WAYS = ("row-wise", "table-wise")


def is_installed() -> bool:
    """Whether TorchRec is there."""
    return importlib.util.find_spec("torchrec") is not None


@contextmanager
def alone() -> Iterator[None]:
    """A job of this process alone, as sharded collections need one."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class _Model(torch.nn.Module):
    """A collection as a part of a model, as TorchRec wants it."""

    def __init__(self, keys: Sequence[str], rows: int, dim: int) -> None:
        super().__init__()
        config = importlib.import_module("torchrec.modules.embedding_configs").EmbeddingBagConfig
        collection = importlib.import_module("torchrec.modules.embedding_modules").EmbeddingBagCollection
        self.bags = collection(
            tables=[config(name=key, num_embeddings=rows, embedding_dim=dim, feature_names=[key]) for key in keys]
        )

    def forward(self, features: Any) -> Any:
        """Pools the bags."""
        return self.bags(features)


def sharded_collection(keys: Sequence[str], rows: int, dim: int, way: str) -> torch.nn.Module:
    """A collection of one table a key, stepped by AdaGrad in its backward pass."""
    part = importlib.import_module
    model = _Model(keys, rows, dim)
    apply = part("torchrec.optim.apply_optimizer_in_backward").apply_optimizer_in_backward
    apply(torch.optim.Adagrad, model.parameters(), {"lr": 0.01})
    plans, types = part("torchrec.distributed.sharding_plan"), part("torchrec.distributed.types")
    sharder = part("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder()
    world = dist.get_world_size()
    ways = {
        key: plans.row_wise() if way == "row-wise" else plans.table_wise(rank=place % world)
        for place, key in enumerate(keys)
    }
    plan = plans.construct_module_sharding_plan(
        model.bags, ways, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return part("torchrec.distributed.model_parallel").DistributedModelParallel(
        model,
        env=types.ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=types.ShardingPlan({"bags": plan}),
        sharders=[sharder],
    )


def batches(keys: Sequence[str], places: Iterable[Tensor]) -> list[Any]:
    """Batches of one row number a feature and example, from `[features, examples]`."""
    jagged = importlib.import_module("torchrec.sparse.jagged_tensor").KeyedJaggedTensor
    return [
        jagged.from_lengths_sync(list(keys), part_FB.flatten(), torch.ones(part_FB.numel(), dtype=torch.int64))
        for part_FB in places
    ]
