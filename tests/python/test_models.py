"""The click models over tables, against their formulas written out and against `nn.Embedding`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu

from recstore_ops import RecStoreClient, SparseOptimizer, table_statistics
from recstore_ops.training import Batch, NnTables, StoreTables, evaluate
from recstore_ops.training.models import DCN, DLRM, DeepFM, FactorizationMachine, LogisticRegression, WideAndDeep
from recstore_ops.training.models import __file__ as models_file

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]

NUM_IDS = 6
DIM = 3
SGD = {"kind": "sgd", "lr": 0.5}

# Row 1 is empty, and row 2 has the id 2 twice.
SPARSE = Batch(
    ids=torch.tensor([0, 3, 5, 2, 2, 4, 1]),
    values=torch.tensor([1.0, 0.5, -2.0, 1.0, 3.0, 0.25, 1.0]),
    offsets=torch.tensor([0, 3, 3, 6, 7]),
    labels=torch.tensor([1.0, 0.0, 0.0, 1.0]),
)
# Three rows of two fields with one id each, and two dense features.
ONE_EACH = Batch(
    ids=torch.tensor([0, 3, 1, 3, 0, 5]),
    labels=torch.tensor([1.0, 0.0, 1.0]),
    num_fields=2,
    dense=torch.tensor([[0.5, -1.0], [0.0, 2.0], [1.0, 1.0]]),
)
# Two rows of two fields: the first field of row 0 has two ids, the second of row 1 none.
BAGS = Batch(
    ids=torch.tensor([0, 1, 3, 2]),
    values=torch.tensor([1.0, 2.0, 1.0, 0.5]),
    offsets=torch.tensor([0, 2, 3, 4, 4]),
    labels=torch.tensor([1.0, 0.0]),
    num_fields=2,
    dense=torch.tensor([[0.5, -1.0], [0.0, 2.0]]),
)

DEEP: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (DeepFM, {"dim": DIM}),
    (DLRM, {"dim": DIM, "bottom": (5,)}),
    (WideAndDeep, {"dim": DIM}),
    (DCN, {"dim": DIM}),
]


@pytest.fixture
def weights() -> Tensor:
    return torch.randn(NUM_IDS, 1, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def factors() -> Tensor:
    return torch.randn(NUM_IDS, DIM, generator=torch.Generator().manual_seed(2))


def write_rows(table: str, rows: Tensor) -> None:
    RecStoreClient().push(table, torch.arange(NUM_IDS), rows)


def make_fm(name: str, weights: Tensor, factors: Tensor, **options: Any) -> FactorizationMachine:
    model = FactorizationMachine(StoreTables(name, SGD), DIM, **options)
    write_rows(f"{name}/w", weights)
    write_rows(f"{name}/v", factors)
    return model


def make_deep(kind: type[nn.Module], tables: StoreTables | NnTables, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return kind(tables, num_fields=2, num_dense=2, hidden=(4, 3), init_std=0.5, **options)


def fm_by_all_pairs(weights: Tensor, factors: Tensor, batch: Batch = SPARSE) -> Tensor:
    """Logits by the definition: every weight, and every pair of features once."""
    logits = []
    offsets, ids, values = batch.offsets_or_ones()[:: batch.num_fields], batch.ids, batch.values_or_ones()
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        logit = torch.zeros(())
        for i in range(first, last):
            logit = logit + weights[ids[i], 0] * values[i]
            for j in range(first, i):
                similarity = (factors[ids[i]] * factors[ids[j]]).sum()
                logit = logit + similarity * values[i] * values[j]
        logits.append(logit)
    return torch.stack(logits)


def fields_by_loop(factors: Tensor, batch: Batch) -> Tensor:
    """The sum of each field's rows, [B, F, D]."""
    offsets, values = batch.offsets_or_ones().tolist(), batch.values_or_ones()
    bags = [
        (factors[batch.ids[first:last]] * values[first:last, None]).sum(0)
        for first, last in itertools.pairwise(offsets)
    ]
    return torch.stack(bags).view(len(batch), batch.num_fields, -1)


def step(model: nn.Module, batch: Batch) -> None:
    """One step of the tables by the store, and of the other parameters by SGD with the same rate."""
    parameters = list(model.parameters())
    optimizers: list[torch.optim.Optimizer] = [SparseOptimizer(modules=[model])]
    if parameters:
        optimizers.append(torch.optim.SGD(parameters, lr=0.5))
    for optimizer in optimizers:
        optimizer.zero_grad()
    binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
    for optimizer in optimizers:
        optimizer.step()


def test_fm_logits_are_the_sum_over_all_pairs(table_name: TableName, weights: Tensor, factors: Tensor) -> None:
    model = make_fm(table_name(), weights, factors)
    torch.testing.assert_close(model(SPARSE), fm_by_all_pairs(weights, factors))


@pytest.mark.parametrize("batch", [ONE_EACH, BAGS], ids=["one id a field", "bags"])
def test_fm_takes_the_ids_of_all_fields_alike(
    table_name: TableName, weights: Tensor, factors: Tensor, batch: Batch
) -> None:
    model = make_fm(table_name(), weights, factors, num_dense=2)
    dense = model.linear.dense
    assert dense is not None
    dense.data.copy_(torch.tensor([0.25, -0.5]))
    assert batch.dense is not None
    expected = fm_by_all_pairs(weights, factors, batch) + batch.dense @ torch.tensor([0.25, -0.5])
    torch.testing.assert_close(model(batch), expected)


def test_lr_logits_are_weighted_sums(table_name: TableName, weights: Tensor) -> None:
    name = table_name()
    model = LogisticRegression(StoreTables(name, SGD))
    write_rows(f"{name}/w", weights)
    expected = fm_by_all_pairs(weights, torch.zeros(NUM_IDS, DIM))
    torch.testing.assert_close(model(SPARSE), expected)


@pytest.mark.parametrize("batch", [ONE_EACH, BAGS], ids=["one id a field", "bags"])
def test_deepfm_is_an_fm_and_a_perceptron_over_the_same_factors(
    table_name: TableName, weights: Tensor, factors: Tensor, batch: Batch
) -> None:
    name = table_name()
    model = make_deep(DeepFM, StoreTables(name, SGD), {"dim": DIM})
    write_rows(f"{name}/w", weights)
    write_rows(f"{name}/v", factors)
    first, second, last = (layer for layer in model.deep if isinstance(layer, nn.Linear))
    assert batch.dense is not None
    x = torch.cat([fields_by_loop(factors, batch).flatten(1), batch.dense], dim=1)
    deep = last(relu(second(relu(first(x))))).squeeze(1)
    torch.testing.assert_close(model(batch), fm_by_all_pairs(weights, factors, batch) + deep)


@pytest.mark.parametrize("batch", [ONE_EACH, BAGS], ids=["one id a field", "bags"])
def test_dlrm_takes_the_dot_product_of_every_pair(table_name: TableName, factors: Tensor, batch: Batch) -> None:
    name = table_name()
    model = make_deep(DLRM, StoreTables(name, SGD), {"dim": DIM})
    write_rows(f"{name}/v", factors)
    bottom = model.bottom(batch.dense)
    fields = fields_by_loop(factors, batch)
    vectors = [bottom, fields[:, 0], fields[:, 1]]
    dots = [(vectors[i] * vectors[j]).sum(1) for i, j in ((0, 1), (0, 2), (1, 2))]
    expected = model.top(torch.cat([bottom, torch.stack(dots, dim=1)], dim=1)).squeeze(1)
    torch.testing.assert_close(model(batch), expected)


def test_dlrm_without_dense_features_has_no_bottom(table_name: TableName, factors: Tensor) -> None:
    name = table_name()
    model = DLRM(StoreTables(name, SGD), DIM, num_fields=2)
    write_rows(f"{name}/v", factors)
    fields = fields_by_loop(factors, ONE_EACH)
    expected = model.top((fields[:, 0] * fields[:, 1]).sum(1, keepdim=True)).squeeze(1)
    torch.testing.assert_close(model(ONE_EACH), expected)


def test_dlrm_needs_two_vectors(table_name: TableName) -> None:
    with pytest.raises(ValueError, match="dot products of at least two features, got 1 fields and no dense"):
        DLRM(StoreTables(table_name(), SGD), DIM, num_fields=1)


@pytest.mark.parametrize("batch", [ONE_EACH, BAGS], ids=["one id a field", "bags"])
def test_wide_and_deep_adds_a_linear_model_and_a_perceptron(
    table_name: TableName, weights: Tensor, factors: Tensor, batch: Batch
) -> None:
    name = table_name()
    model = make_deep(WideAndDeep, StoreTables(name, SGD), {"dim": DIM})
    write_rows(f"{name}/w", weights)
    write_rows(f"{name}/v", factors)
    assert batch.dense is not None
    wide = fm_by_all_pairs(weights, torch.zeros_like(factors), batch)
    deep = model.deep(torch.cat([fields_by_loop(factors, batch).flatten(1), batch.dense], dim=1)).squeeze(1)
    torch.testing.assert_close(model(batch), wide + deep)


def test_a_cross_gives_each_pair_of_ids_a_weight(table_name: TableName) -> None:
    """Labels are the exclusive or of two ids, which no sum of weights of single ids can tell."""
    name = table_name()
    ids = torch.tensor([[0, 2], [0, 3], [1, 2], [1, 3]])
    batch = Batch(ids=ids.view(-1), labels=torch.tensor([0.0, 1.0, 1.0, 0.0]), num_fields=2)
    model = WideAndDeep(StoreTables(name, SGD), DIM, num_fields=2, crosses=[(0, 1)])
    for layer in model.deep:
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.weight)
    optimizer = SparseOptimizer(modules=[model])
    for _ in range(50):
        binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        optimizer.step()
    assert (model(batch) > 0).tolist() == [False, True, True, False]
    assert table_statistics(f"{name}/crosses")["rows"] == 4


@pytest.mark.parametrize("cross", [(0, 0), (0, 2), (-1, 1)])
def test_a_cross_of_absent_or_equal_fields_is_refused(table_name: TableName, cross: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"a cross needs two of the 2 fields, got {cross[0]} and {cross[1]}"):
        WideAndDeep(StoreTables(table_name(), SGD), DIM, num_fields=2, crosses=[cross])


def test_crosses_need_one_id_a_field(table_name: TableName) -> None:
    model = make_deep(WideAndDeep, StoreTables(table_name(), SGD), {"dim": DIM, "crosses": [(0, 1)]})
    with pytest.raises(ValueError, match="exactly one id a field"):
        model(BAGS)


@pytest.mark.parametrize(("kind", "options"), DEEP, ids=[kind.__name__ for kind, _ in DEEP])
@pytest.mark.parametrize("batch", [ONE_EACH, BAGS], ids=["one id a field", "bags"])
def test_steps_equal_those_of_sparse_embeddings(
    table_name: TableName, kind: type[nn.Module], options: dict[str, Any], batch: Batch
) -> None:
    name = table_name()
    theirs = make_deep(kind, NnTables(torch.arange(NUM_IDS), name), options)
    ours = make_deep(kind, StoreTables(name, SGD), options)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(3):
        torch.testing.assert_close(ours(batch), theirs(batch))
        step(ours, batch)
        sgd.zero_grad()
        binary_cross_entropy_with_logits(theirs(batch), batch.labels).backward()
        sgd.step()
    torch.testing.assert_close(
        RecStoreClient().pull(f"{name}/v", torch.arange(NUM_IDS)),
        theirs.get_parameter("fm.v.weight" if kind is DeepFM else "v.weight").detach(),
    )


def test_one_fm_step_equals_autograd_through_the_pairs(table_name: TableName, weights: Tensor, factors: Tensor) -> None:
    name = table_name()
    model = make_fm(name, weights, factors)
    step(model, SPARSE)

    w, v, b = (t.clone().requires_grad_() for t in (weights, factors, torch.zeros(())))
    binary_cross_entropy_with_logits(fm_by_all_pairs(w, v) + b, SPARSE.labels).backward()
    expected = [(t - 0.5 * t.grad).detach() for t in (w, v, b) if t.grad is not None]
    every_id = torch.arange(NUM_IDS)
    stepped = [RecStoreClient().pull(f"{name}/{table}", every_id) for table in ("w", "v")]
    bias = dict(model.named_parameters())["linear.bias"]
    torch.testing.assert_close([*stepped, bias.detach()], expected)


def test_an_empty_row_has_the_bias_as_its_logit(table_name: TableName) -> None:
    model = FactorizationMachine(StoreTables(table_name(), SGD), DIM)
    bias = model.linear.bias
    assert bias is not None
    bias.data.fill_(0.75)
    none = torch.tensor([], dtype=torch.int64)
    assert model(Batch(ids=none, labels=torch.zeros(2), offsets=torch.tensor([0, 0, 0]))).tolist() == [0.75, 0.75]


def test_a_model_without_bias_has_none(table_name: TableName) -> None:
    model = LogisticRegression(StoreTables(table_name(), SGD), bias=False)
    assert model.bias is None
    assert model(SPARSE).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_dropout_follows_each_hidden_layer_in_training_only(table_name: TableName) -> None:
    model = DeepFM(StoreTables(table_name(), SGD), DIM, num_fields=2, hidden=(8, 8), dropout=0.5, num_dense=2)
    assert [type(layer).__name__ for layer in model.deep] == [
        *("Linear", "ReLU", "Dropout"),
        *("Linear", "ReLU", "Dropout"),
        "Linear",
    ]
    model.eval()
    assert torch.equal(model(ONE_EACH), model(ONE_EACH))


def test_evaluation_gives_unknown_ids_no_row(table_name: TableName) -> None:
    name = table_name()
    model = FactorizationMachine(StoreTables(name, SGD), DIM)
    step(model, SPARSE)
    before = [table_statistics(f"{name}/{table}")["rows"] for table in ("w", "v")]
    evaluate(model, [replace(SPARSE, ids=SPARSE.ids + 2**40)])
    assert before == [NUM_IDS, NUM_IDS]
    assert [table_statistics(f"{name}/{table}")["rows"] for table in ("w", "v")] == before


def test_factors_start_normal_and_by_the_seed(table_name: TableName) -> None:
    name = table_name()

    def initial_factors(seed: int) -> Tensor:
        model = FactorizationMachine(StoreTables(name, SGD, seed=seed), 4, init_std=0.1)
        rows = model.v(torch.arange(5000)).detach()
        for table in ("w", "v"):
            RecStoreClient().drop(f"{name}/{table}")
        return rows

    rows = initial_factors(seed=7)
    assert torch.equal(rows, initial_factors(seed=7))
    assert not torch.equal(rows, initial_factors(seed=8))
    # 20,000 draws: the standard error of the mean is 0.0007, that of the deviation 0.0005.
    assert rows.mean().item() == pytest.approx(0.0, abs=0.0035)
    assert rows.std().item() == pytest.approx(0.1, abs=0.0025)


def test_a_closed_vocabulary_refuses_other_ids(table_name: TableName) -> None:
    model = LogisticRegression(StoreTables(table_name(), SGD, num_embeddings=5))
    with pytest.raises(IndexError, match="5"):
        model(SPARSE)


def test_every_model_fits_on_two_pages() -> None:
    for path in Path(models_file).parent.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 150, path
