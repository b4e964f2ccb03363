"""`replace_embeddings` on collections of TorchRec, beside the same collections as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recstore_ops import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    get_kv_client,
    replace_embeddings,
    restore_embeddings,
    table_names,
)

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, BATCH, TOLERANCE = 100, 6, 1e-5


@pytest.fixture(autouse=True)
def _tables_are_dropped() -> Iterator[None]:
    before = set(table_names())
    yield
    for name in set(table_names()) - before:
        get_kv_client().drop(name)


def bags(**options: Any) -> EmbeddingBagCollection:
    described: dict[str, Any] = {"num_embeddings": 30, "embedding_dim": 4, **options}
    tables = [
        EmbeddingBagConfig(name="t1", feature_names=["a", "b"], pooling=PoolingType.SUM, **described),
        EmbeddingBagConfig(name="t2", feature_names=["c"], pooling=PoolingType.MEAN, **described),
    ]
    return EmbeddingBagCollection(device=torch.device("cpu"), tables=tables)


def rows(**options: Any) -> EmbeddingCollection:
    tables = [EmbeddingConfig(name="t3", num_embeddings=30, embedding_dim=4, feature_names=["a", "b", "c"])]
    return EmbeddingCollection(device=torch.device("cpu"), tables=tables, **options)


class Model(nn.Module):
    def __init__(self, collection: Any) -> None:
        super().__init__()
        self.sparse: Any = collection
        self.top = nn.Linear(4, 1)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        found = self.sparse(batch)
        parts = [found[key] for key in ("a", "b", "c")]
        return self.top(torch.cat([part if isinstance(part, Tensor) else part.values() for part in parts]))


def losses(model: Model, optimizers: list[torch.optim.Optimizer]) -> Tensor:
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (3 * BATCH,), dtype=torch.int32)
        values = torch.randint(30, (int(lengths.sum()),))
        value = (model(KeyedJaggedTensor.from_lengths_sync(["a", "b", "c"], values, lengths)) - 1).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(value.detach())
    return torch.stack(found)


@pytest.mark.parametrize("make", [bags, rows])
def test_a_model_over_a_collection_trains_as_it_would_have(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    original = Model(make())
    model = copy.deepcopy(original)
    replaced = replace_embeddings(
        model, prefix="of torchrec/", optimizer={"kind": "adagrad", "lr": 0.1, "convention": "torch"}
    )
    assert isinstance(model.sparse, RecStoreEmbeddingBagCollection | RecStoreEmbeddingCollection)
    names = ["t1", "t2"] if make is bags else ["t3"]
    assert replaced.tables == {f"sparse.{name}": f"of torchrec/{name}" for name in names}
    dense = torch.optim.Adagrad(replaced.dense_parameters(), lr=0.1)
    expected = losses(original, [torch.optim.Adagrad(original.parameters(), lr=0.1)])
    torch.testing.assert_close(losses(model, [replaced.optimizer, dense]), expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(ValueError, match=r'"sparse": it is a RecStoreEmbedding.*Collection, and only DistEmbedding'):
        restore_embeddings(model)


class Sharded(EmbeddingBagCollection):
    pass


def shared_features() -> EmbeddingBagCollection:
    described: dict[str, Any] = {"num_embeddings": 30, "embedding_dim": 4, "feature_names": ["a"]}
    tables = [EmbeddingBagConfig(name=name, **described) for name in ("t1", "t2")]
    return EmbeddingBagCollection(device=torch.device("cpu"), tables=tables)


def on_meta() -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(name="t1", num_embeddings=3, embedding_dim=4, feature_names=["a"])]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)


def of_a_class() -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(name="t1", num_embeddings=3, embedding_dim=4, feature_names=["a"])]
    return Sharded(device=torch.device("cpu"), tables=tables)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: bags(data_type=DataType.FP16),
            'table "t1": a table of a collection is made of torch.float32, and',
        ),
        (shared_features, r"a prefix would change the names of the outputs of \['a'\], which look up several tables"),
        (on_meta, 'table "t1": its weight is on the meta device'),
        (of_a_class, "it is a Sharded, and only plain EmbeddingBagCollection and EmbeddingCollection are replaced"),
    ],
)
def test_a_collection_that_no_table_can_be_is_refused(make: Callable[[], Any], message: str) -> None:
    model = Model(make())
    collection, before = model.sparse, table_names()
    with pytest.raises(ValueError, match=message):
        replace_embeddings(model, prefix="of torchrec/")
    assert model.sparse is collection
    assert table_names() == before
