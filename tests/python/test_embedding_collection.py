"""A collection without pooling against one `torch.nn.Embedding` a table: rows, gradients, training.

Shape suffixes: N ids of a feature, D dim.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from examples import steps
from torch import Tensor, nn

from recstore_ops import SparseOptimizer
from recstore_ops.config.collection_config import EmbeddingConfig
from recstore_ops.nn.embedding_collection import RecStoreEmbeddingCollection
from recstore_ops.sparse import KeyedJaggedTensor

# torch's Adagrad makes sparse tensors without saying whether they shall be checked.
pytestmark = [pytest.mark.tier("test"), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

NUM_IDS, STEPS, BATCH = 30, steps(50), 6
TOLERANCE = 1e-5
ADAGRAD = {"kind": "adagrad", "lr": 0.1, "convention": "torch", "eps": 1e-3}

Tables = dict[str, tuple[int, tuple[str, ...]]]
"""The dim and the features of each table."""

CASES: dict[str, Tables] = {
    "a table a feature": {"u": (4, ("a",)), "i": (4, ("b",)), "d": (4, ("c",))},
    "a shared table": {"u": (4, ("a", "c")), "i": (4, ("b",))},
    "several dims": {"u": (4, ("a", "c")), "i": (2, ("b",))},
    "several tables a feature": {"u": (4, ("a", "c")), "i": (4, ("a", "b"))},
}


def collection(tables: Tables, prefix: str, **options: Any) -> RecStoreEmbeddingCollection:
    configs = [
        EmbeddingConfig(f"{prefix}/{name}", NUM_IDS, dim, list(features)) for name, (dim, features) in tables.items()
    ]
    return RecStoreEmbeddingCollection(configs, initializer={"kind": "normal", "std": 0.5}, **options)


def batches(count: int = STEPS) -> Iterator[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(0)
    for step in range(count):
        lengths = torch.randint(0, 1 if step % 10 == 9 else 5, (3 * BATCH,), generator=generator)
        values = torch.randint(NUM_IDS, (int(lengths.sum()),), generator=generator)
        yield KeyedJaggedTensor(["b", "c", "a"], values, lengths=lengths)


def rivals(ours: RecStoreEmbeddingCollection) -> list[nn.Embedding]:
    ids = torch.arange(NUM_IDS)
    return [
        nn.Embedding(NUM_IDS, table.embedding_dim, sparse=True, _weight=table.weight[ids])
        for table in ours.embeddings.values()
    ]


def rival_rows(
    ours: RecStoreEmbeddingCollection, theirs: list[nn.Embedding], features: KeyedJaggedTensor
) -> list[Tensor]:
    """The rows of each feature, in the order of the tables."""
    configs = zip(ours.embedding_configs(), theirs, strict=True)
    return [table(features[name].values()) for config, table in configs for name in config.feature_names]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def assert_same_gradients(ours: RecStoreEmbeddingCollection, theirs: list[nn.Embedding]) -> None:
    collected = {name: (ids, grads) for name, ids, grads in ours._trace}
    for (name, table), rival in zip(ours.embeddings.items(), theirs, strict=True):
        expected = rival.weight.grad
        assert expected is not None
        ids, grads = collected.get(name, (torch.empty(0).long(), torch.empty(0, table.embedding_dim)))
        assert torch.equal(ids, expected.coalesce().indices()[0])
        assert_near(grads, expected.coalesce().values())


def assert_train_alike(
    ours: RecStoreEmbeddingCollection, forward: Callable[[KeyedJaggedTensor], Any], steps: Iterator[KeyedJaggedTensor]
) -> None:
    theirs = rivals(ours)
    sparse = SparseOptimizer(modules=[ours])
    rival_optimizer = torch.optim.Adagrad([table.weight for table in theirs], lr=0.1, eps=1e-3)
    for features in steps:
        outputs = forward(features)
        expected = rival_rows(ours, theirs, features)
        for (key, output), rows_ND in zip(outputs.items(), expected, strict=True):
            assert_near(output.values(), rows_ND)
            assert torch.equal(output.lengths(), features[key.partition("@")[0]].lengths())
        torch.stack([(part.values() ** 2 - part.values()).sum() for part in outputs.values()]).sum().backward()
        torch.stack([(rows_ND**2 - rows_ND).sum() for rows_ND in expected]).sum().backward()
        assert_same_gradients(ours, theirs)
        sparse.step()
        rival_optimizer.step()
        rival_optimizer.zero_grad()
    for table, rival in zip(ours.embeddings.values(), theirs, strict=True):
        assert_near(table.weight[torch.arange(NUM_IDS)], rival.weight.detach())


@pytest.mark.parametrize("tables", CASES.values(), ids=CASES)
def test_a_collection_trains_as_the_embeddings_of_torch(tables: Tables, table_name: Callable[[], str]) -> None:
    ours = collection(tables, table_name(), optimizer=ADAGRAD)
    assert_train_alike(ours, ours, batches())


@pytest.mark.parametrize("tables", CASES.values(), ids=CASES)
@pytest.mark.tier("all")
def test_a_compiled_collection_trains_as_the_embeddings_of_torch(
    tables: Tables, table_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    ours = collection(tables, table_name(), optimizer=ADAGRAD)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_train_alike(ours, compiled, batches())
    torch._dynamo.reset()


def test_features_of_one_table_make_one_step_an_id(table_name: Callable[[], str]) -> None:
    rows = RecStoreEmbeddingCollection(
        [EmbeddingConfig(table_name(), None, 1, ["a", "b"])],
        optimizer={"kind": "adagrad", "lr": 0.1},
        initializer="zeros",
    )
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([7, 7]), lengths=torch.tensor([1, 1]))
    outputs = rows(features)

    (0.1 * outputs["a"].values() + 0.2 * outputs["b"].values()).sum().backward()
    SparseOptimizer(modules=[rows]).step()

    # 0.3 / sqrt(0.3^2) = 1: one step of the learning rate, not two.
    assert rows(features)["a"].values().item() == pytest.approx(-0.1)


def test_a_sequence_model_trains_on_the_padded_rows(table_name: Callable[[], str]) -> None:
    rows = collection({"u": (4, ("a", "b", "c"))}, table_name(), optimizer={"kind": "sgd", "lr": 0.1})
    features = KeyedJaggedTensor(list("abc"), torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 0, 1, 0, 0]))
    before = rows.embeddings[rows.embedding_configs()[0].name].weight[[1, 2, 3]]
    padded = rows(features)["a"].to_padded_dense(3)
    assert padded.shape == (2, 3, 4)
    padded.sum().backward()
    SparseOptimizer(modules=[rows]).step()
    after = rows.embeddings[rows.embedding_configs()[0].name].weight[[1, 2, 3]]
    assert_near(before - after, torch.tensor([[0.1] * 4, [0.1] * 4, [0.0] * 4]))


def test_weights_of_a_batch_are_passed_on(table_name: Callable[[], str]) -> None:
    rows = collection({"u": (4, ("a",))}, table_name())
    features = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), torch.tensor([0.5, 2.0]), torch.tensor([1, 1]))
    assert rows(features)["a"].weights().tolist() == [0.5, 2.0]


def test_a_feature_of_several_tables_is_named_with_its_table() -> None:
    rows = collection(CASES["several tables a feature"], "several")
    assert list(rows(next(batches()))) == ["a@several/u", "c", "a@several/i", "b"]


def test_a_pickle_reopens_the_tables(table_name: Callable[[], str]) -> None:
    rows = collection(CASES["several dims"], table_name())
    features = next(batches())
    outputs, others = rows(features), pickle.loads(pickle.dumps(rows))(features)
    assert all(torch.equal(outputs[key].values(), others[key].values()) for key in outputs)


def test_a_collection_refuses_what_it_does_not_take(table_name: Callable[[], str]) -> None:
    with pytest.raises(ValueError, match=r"EmbeddingConfig got unknown fields \['pooling'\]"):
        RecStoreEmbeddingCollection([{"name": "t", "num_embeddings": 1, "embedding_dim": 2, "pooling": "sum"}])
    rows = collection(CASES["a shared table"], table_name())
    with pytest.raises(ValueError, match=r"lacks \['c', 'b'\] and has \[\] besides"):
        rows(KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1])))
    with pytest.raises(IndexError, match="num_embeddings 30"):
        rows(KeyedJaggedTensor(["a", "b", "c"], torch.tensor([30, 1, 1]), lengths=torch.tensor([1, 1, 1])))
