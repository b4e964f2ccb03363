"""The collections against TorchRec's, and row-wise AdaGrad against FBGEMM's: outputs, gradients, 50 steps.

`make test-peers` runs this in an environment with TorchRec 1.8.0 and FBGEMM 1.8.0 for the CPU.

Shape suffixes: F features, B examples, N ids of all features, D dims of all features together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.modules import embedding_configs as torchrec_configs
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse import jagged_tensor as torchrec_sparse

from recstore_ops import SparseOptimizer, sparse
from recstore_ops.nn.embedding_bag_collection import RecStoreEmbeddingBagCollection
from recstore_ops.nn.embedding_collection import RecStoreEmbeddingCollection

# torch's Adagrad, and TorchRec on its own, warn of what does not concern us.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_IDS, BATCH, STEPS = 30, 6, 50
IDS = torch.arange(NUM_IDS)
TOLERANCE = 1e-5
"""Rows, outputs and gradients are of order 1; float32 rounds them to 6e-8, and 50 steps feed that back."""

OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({"kind": "sgd", "lr": 0.1}, lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (
        {"kind": "adagrad", "lr": 0.1, "eps": 1e-3, "convention": "torch"},
        lambda weights: torch.optim.Adagrad(weights, lr=0.1, eps=1e-3),
    ),
}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@dataclass(frozen=True)
class Case:
    """Tables as `(dim, pooling, features)`, and what the batches are like."""

    tables: tuple[tuple[int, str, tuple[str, ...]], ...]
    keys: tuple[str, ...] = ("a", "b", "c")
    weighted: bool = False


CASES = {
    "sum": Case(((4, "SUM", ("a",)), (4, "SUM", ("b", "c")))),
    "mean": Case(((4, "MEAN", ("a", "b")), (4, "MEAN", ("c",)))),
    "sum and mean": Case(((4, "SUM", ("a",)), (4, "MEAN", ("b", "c"))), ("c", "a", "b")),
    "several dims": Case(((4, "SUM", ("a", "c")), (2, "MEAN", ("b",)))),
    "weights": Case(((4, "SUM", ("a", "c")), (2, "SUM", ("b",))), ("b", "a", "c"), weighted=True),
    "several tables a feature": Case(((4, "SUM", ("a", "b")), (2, "SUM", ("b", "c")))),
}


def batches(case: Case) -> Iterator[torchrec_sparse.KeyedJaggedTensor]:
    """Bags of int32 lengths, as TorchRec has them, with duplicate ids and empty ones."""
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        longest = 1 if step % 10 == 9 else 5
        lengths = torch.randint(0, longest, (len(case.keys) * BATCH,), generator=generator, dtype=torch.int32)
        values = torch.randint(NUM_IDS, (int(lengths.sum()),), generator=generator)
        weights = torch.randn(len(values), generator=generator) if case.weighted else None
        yield torchrec_sparse.KeyedJaggedTensor.from_lengths_sync(list(case.keys), values, lengths, weights)


def with_own_weights(batch: torchrec_sparse.KeyedJaggedTensor) -> torchrec_sparse.KeyedJaggedTensor:
    weights = batch.weights_or_none()
    weights = None if weights is None else weights.clone().requires_grad_()
    return torchrec_sparse.KeyedJaggedTensor(batch.keys(), batch.values(), weights, batch.lengths())


def train_alike(
    ours: Any,
    forward: Callable[[Any], dict[str, Tensor]],
    tables: dict[str, Any],
    theirs: Callable[[Any], dict[str, Tensor]],
    weights: dict[str, Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    case: Case,
) -> None:
    """Trains both side by side; compares outputs and gradients of each step, and the rows at the end."""
    for name, weight in weights.items():
        tables[name].weight[IDS] = weight.detach()
    dense, sparse_optimizer = optimizer(weights.values()), SparseOptimizer(modules=[ours])
    generator = torch.Generator().manual_seed(1)
    for batch in batches(case):
        own, other = with_own_weights(batch), with_own_weights(batch)
        outputs, expected = forward(own), theirs(other)
        assert list(outputs) == list(expected)
        slopes = {key: torch.randn(rows.shape, generator=generator) for key, rows in expected.items()}
        for key in expected:
            assert_near(outputs[key], expected[key])
        for results in (outputs, expected):
            torch.stack([(rows * (slopes[key] + 0.25 * rows)).sum() for key, rows in results.items()]).sum().backward()

        collected = {name: (ids, grads) for name, ids, grads in ours._trace}
        for name, weight in weights.items():
            ids, grads = collected.get(name, (IDS[:0], torch.empty(0, weight.shape[1])))
            assert weight.grad is not None
            assert_near(torch.zeros_like(weight).index_copy(0, ids, grads), weight.grad)
        if case.weighted:
            assert_near(own.weights().grad, other.weights().grad)

        sparse_optimizer.step()
        dense.step()
        dense.zero_grad()
    for name, weight in weights.items():
        assert_near(tables[name].weight[IDS], weight.detach())


def bag_configs(case: Case, prefix: str) -> list[torchrec_configs.EmbeddingBagConfig]:
    return [
        torchrec_configs.EmbeddingBagConfig(
            num_embeddings=NUM_IDS,
            embedding_dim=dim,
            name=f"{prefix} {number}",
            feature_names=list(features),
            pooling=torchrec_configs.PoolingType[pooling],
            weight_init_min=-1.0,
            weight_init_max=1.0,
        )
        for number, (dim, pooling, features) in enumerate(case.tables)
    ]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bags_train_as_torchrecs(case: Case, optimizer: str, is_compiled: bool, request: pytest.FixtureRequest) -> None:
    torch._dynamo.reset()
    own_optimizer, their_optimizer = OPTIMIZERS[optimizer]
    configs = bag_configs(case, request.node.name)
    theirs = EmbeddingBagCollection(configs, is_weighted=case.weighted)
    ours = RecStoreEmbeddingBagCollection(configs, optimizer=own_optimizer, keyed_output=True)
    call = torch.compile(ours, backend="aot_eager", dynamic=True) if is_compiled else ours

    def forward(features: Any) -> dict[str, Tensor]:
        output = call(features)
        assert type(output) is torchrec_sparse.KeyedTensor
        return output.to_dict()

    train_alike(
        ours,
        forward,
        ours.embedding_bags,
        lambda features: theirs(features).to_dict(),
        {name: bag.weight for name, bag in theirs.embedding_bags.items()},
        their_optimizer,
        case,
    )


def test_a_batch_of_torchrec_compiles_whole_and_once(request: pytest.FixtureRequest) -> None:
    torch._dynamo.reset()
    case = CASES["sum and mean"]
    ours = RecStoreEmbeddingBagCollection(bag_configs(case, request.node.name))
    compiled = torch.compile(ours, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(case):
            if batch.values().numel() > 1:
                assert_near(compiled(batch), ours(batch))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "case",
    [
        Case(((4, "", ("a",)), (4, "", ("b", "c")))),
        Case(((4, "", ("a", "b")), (4, "", ("b", "c"))), ("c", "a", "b")),
    ],
    ids=["a shared table", "several tables a feature"],
)
def test_rows_train_as_torchrecs(case: Case, optimizer: str, request: pytest.FixtureRequest) -> None:
    own_optimizer, their_optimizer = OPTIMIZERS[optimizer]
    configs = [
        torchrec_configs.EmbeddingConfig(NUM_IDS, dim, f"{request.node.name} {number}", feature_names=list(features))
        for number, (dim, _, features) in enumerate(case.tables)
    ]
    theirs = EmbeddingCollection(configs)
    ours = RecStoreEmbeddingCollection(configs, optimizer=own_optimizer)

    def rows_of(outputs: dict[str, Any]) -> dict[str, Tensor]:
        assert all(type(output) is torchrec_sparse.JaggedTensor for output in outputs.values())
        return {key: output.values() for key, output in outputs.items()}

    train_alike(
        ours,
        lambda features: rows_of(ours(features)),
        ours.embeddings,
        lambda features: rows_of(theirs(features)),
        {name: table.weight for name, table in theirs.embeddings.items()},
        their_optimizer,
        case,
    )


def test_a_table_described_to_torchrec_starts_in_the_same_range(request: pytest.FixtureRequest) -> None:
    config = torchrec_configs.EmbeddingBagConfig(NUM_IDS, 64, request.node.name, feature_names=["a"])
    bags = RecStoreEmbeddingBagCollection([config])
    rows, bound = bags.embedding_bags[request.node.name].weight[IDS], NUM_IDS**-0.5
    assert rows.abs().max() <= bound
    assert rows.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_a_table_that_cannot_be_taken_over_is_refused() -> None:
    half = torchrec_configs.EmbeddingBagConfig(
        NUM_IDS, 4, "half", data_type=torchrec_configs.DataType.FP16, feature_names=["a"]
    )
    with pytest.raises(ValueError, match='table "half" must hold float32, got FP16'):
        RecStoreEmbeddingBagCollection([half])


def test_batches_answer_as_torchrecs() -> None:
    for theirs in batches(Case((), ("a", "b", "c"), weighted=True)):
        ours = sparse.KeyedJaggedTensor(theirs.keys(), theirs.values(), theirs.weights(), theirs.lengths())
        assert_same_batch(ours, theirs)
        assert_same_batch(ours.permute([2, 0]), theirs.permute([2, 0]))
        for own_part, part in zip(ours.split([1, 0, 2]), theirs.split([1, 0, 2]), strict=True):
            assert_same_batch(own_part, part)
        joined = [kind.concat(list(batch.split([1, 2]))) for kind, batch in kinds_and(ours, theirs)]
        assert_same_batch(joined[0], joined[1])
        rebuilt = [kind.from_jt_dict(batch.to_dict()) for kind, batch in kinds_and(ours, theirs)]
        assert_same_batch(rebuilt[0], rebuilt[1])


def kinds_and(ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    return [(sparse.KeyedJaggedTensor, ours), (torchrec_sparse.KeyedJaggedTensor, theirs)]


def assert_same_batch(ours: sparse.KeyedJaggedTensor, theirs: torchrec_sparse.KeyedJaggedTensor) -> None:
    assert ours.keys() == theirs.keys()
    assert ours.length_per_key() == theirs.length_per_key()
    if not ours.keys():
        return
    assert ours.stride() == theirs.stride()
    assert ours.offset_per_key() == theirs.offset_per_key()
    for name in ("values", "weights", "lengths", "offsets"):
        own, other = getattr(ours, name)(), getattr(theirs, name)()
        assert torch.equal(own, other)
        assert own.dtype == other.dtype
    others = theirs.to_dict()
    for key, part in ours.to_dict().items():
        for length in (None, 2):
            assert torch.equal(part.to_padded_dense(length, 7), others[key].to_padded_dense(length, 7))
        for own, other in zip(part.to_dense(), others[key].to_dense(), strict=True):
            assert torch.equal(own, other)


def test_keyed_tensors_answer_as_torchrecs() -> None:
    keys, parts = ["a", "b", "c"], [torch.randn(5, dim) for dim in (2, 4, 3)]
    ours, theirs = (kind.KeyedTensor.from_tensor_list(keys, parts) for kind in (sparse, torchrec_sparse))
    assert ours.keys() == theirs.keys()
    assert ours.length_per_key() == theirs.length_per_key()
    assert ours.offset_per_key() == theirs.offset_per_key()
    assert torch.equal(ours.values(), theirs.values())
    groups = [["c", "a"], ["b"]]
    grouped = sparse.KeyedTensor.regroup([ours], groups), torchrec_sparse.KeyedTensor.regroup([theirs], groups)
    assert all(torch.equal(own, other) for own, other in zip(*grouped, strict=True))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_row_wise_adagrad_trains_as_fbgemms(pooling: str, request: pytest.FixtureRequest) -> None:
    dims, lr, eps = (8, 4), 0.1, 1e-3
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_IDS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for dim in dims],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=PoolingMode[pooling.upper()],
        learning_rate=lr,
        eps=eps,
    )
    theirs.init_embedding_weights_uniform(-1.0, 1.0)
    ours = RecStoreEmbeddingBagCollection(
        [
            {
                "name": f"{request.node.name} {number}",
                "num_embeddings": NUM_IDS,
                "embedding_dim": dim,
                "feature_names": [f"feature {number}"],
                "pooling": pooling,
            }
            for number, dim in enumerate(dims)
        ],
        optimizer={"kind": "rowwise_adagrad", "lr": lr, "eps": eps, "convention": "torch"},
    )
    tables = list(ours.embedding_bags.values())
    for table, weight in zip(tables, theirs.split_embedding_weights(), strict=True):
        table.weight[IDS] = weight.detach()

    optimizer, generator = SparseOptimizer(modules=[ours]), torch.Generator().manual_seed(1)
    for batch in batches(Case((), tuple(ours.feature_keys))):
        output = ours(batch).values()
        expected = theirs(batch.values(), batch.offsets().to(torch.int64))
        assert_near(output, expected)
        slope = torch.randn(expected.shape, generator=generator)
        for pooled in (output, expected):
            (pooled * (slope + 0.25 * pooled)).sum().backward()
        optimizer.step()
    for table, weight in zip(tables, theirs.split_embedding_weights(), strict=True):
        assert_near(table.weight[IDS], weight.detach())
