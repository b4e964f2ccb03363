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
    DistEmbedding,
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


def with_forward(collection: Any) -> None:
    forward = collection.forward
    collection.forward = lambda batch: forward(batch)


def with_layer(collection: Any) -> None:
    collection.layer = nn.Linear(1, 1)


def with_buffer(collection: Any) -> None:
    collection.register_buffer("seen", torch.zeros(1))


def setting(name: str, value: Any) -> Callable[[Any], None]:
    """Sets an attribute of the collection's first table."""
    return lambda collection: setattr(tables_of(collection)["t1"], name, value)


def swapping(table: nn.Module) -> Callable[[Any], None]:
    """Puts another table in the place of the collection's first."""
    return lambda collection: tables_of(collection).update({"t1": table})


def tables_of(collection: Any) -> Any:
    return collection.embedding_bags


def another(**options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(**{"num_embeddings": 30, "embedding_dim": 4, "include_last_offset": True, **options})


CHANGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "forward": (with_forward, r"\"sparse\": it has the attributes \['forward'\], which ours would not have"),
    "attribute": (lambda each: setattr(each, "label", "x"), r"it has the attributes \['label'\]"),
    "layer": (with_layer, r"it has the attributes \['layer'\]"),
    "buffer": (with_buffer, r"it has the attributes \['seen'\]"),
    "hook": (lambda each: each.register_forward_hook(lambda *args: None), r"it has hooks \(_forward_hooks\)"),
    "hook of a table": (
        lambda each: tables_of(each)["t1"].register_forward_hook(lambda *args: None),
        '"t1": it has hoo',
    ),
    "forward of a table": (
        setting("forward", lambda *args: None),
        r"table \"t1\": it has the attributes \['forward'\]",
    ),
    "max_norm": (setting("max_norm", 1.0), 'table "t1": max_norm changes rows when they are looked up'),
    "padding": (setting("padding_idx", 3), 'table "t1": its padding_idx is 3, and the collection made it with None'),
    "frequency": (setting("scale_grad_by_freq", True), 'table "t1": its scale_grad_by_freq is True'),
    "mode": (swapping(another(mode="mean")), "table \"t1\": its mode is 'mean', and the collection made it with 'sum'"),
    "offsets": (
        swapping(another(mode="sum", include_last_offset=False)),
        'table "t1": its include_last_offset is False, and the collection made it with True',
    ),
    "rows": (
        swapping(another(mode="sum", num_embeddings=31)),
        r'table "t1": its weight has the shape \(31, 4\), and is described as \(30, 4\)',
    ),
    "class": (swapping(nn.Embedding(30, 4)), 'table "t1": it is a Embedding, and the collection made a EmbeddingBag'),
    "one more": (
        lambda each: tables_of(each).update({"t9": another()}),
        r"it has the tables \['t1', 't2', 't9'\], and",
    ),
    "one less": (lambda each: tables_of(each).pop("t2"), r"it has the tables \['t1'\], and describes \['t1', 't2'\]"),
}


def is_refused(model: nn.Module, message: str) -> None:
    modules, before = list(model.modules()), table_names()
    with pytest.raises(ValueError, match=message):
        replace_embeddings(model, prefix="of torchrec/")
    assert [id(each) for each in model.modules()] == [id(each) for each in modules]
    assert table_names() == before


@pytest.mark.parametrize("name", CHANGED)
def test_a_collection_that_was_changed_since_it_was_made_is_refused(name: str) -> None:
    change, message = CHANGED[name]
    model = Model(bags())
    change(model.sparse)
    is_refused(model, message)


@pytest.mark.parametrize("make", [bags, rows])
def test_a_table_of_a_collection_that_something_else_holds_is_refused(make: Callable[[], Any]) -> None:
    model = Model(make())
    name, table = next(iter((model.sparse.embedding_bags if make is bags else model.sparse.embeddings).items()))
    model.held = [table]  # type: ignore[assignment]
    is_refused(model, f'"sparse.{name}": held holds the module too')
    del model.held
    model.held = table
    is_refused(model, f'"sparse.{name}": its weight is that of another module too')


def test_a_collection_within_a_wrapper_is_refused() -> None:
    is_refused(nn.DataParallel(Model(bags())), '"module.sparse": it is within DataParallel: replace before it is wrap')


def test_a_collection_that_fails_behind_another_takes_no_rows_from_tables() -> None:
    replace_embeddings(Model(bags()), prefix="of torchrec/")
    before = [DistEmbedding(30, 4, f"of torchrec/t{i}", on_existing="share").weight[torch.arange(30)] for i in (1, 2)]
    model = nn.ModuleDict({"bags": bags(), "rows": rows()})
    used = DistEmbedding(30, 4, "of torchrec/t3")
    with pytest.raises(ValueError, match='table "of torchrec/t3" is in use'):
        replace_embeddings(model, prefix="of torchrec/", on_existing="reset")
    after = [DistEmbedding(30, 4, f"of torchrec/t{i}", on_existing="share").weight[torch.arange(30)] for i in (1, 2)]
    assert all(map(torch.equal, after, before))
    del used
    replace_embeddings(model, prefix="of torchrec/", on_existing="reset")
    assert [name for name in table_names() if "torchrec/" in name] == [f"of torchrec/t{i}" for i in (1, 2, 3)]
