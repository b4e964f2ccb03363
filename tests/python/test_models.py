"""LR and FM over tables, against the formulas written out and against `nn.Embedding`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recstore_ops import RecStoreClient, SparseOptimizer, table_statistics
from recstore_ops.training import FactorizationMachine, LogisticRegression, evaluate
from recstore_ops.training.batch import Batch

TableName = Callable[[], str]

NUM_IDS = 6
DIM = 3
SGD = {"kind": "sgd", "lr": 0.5}

# Row 1 is empty, and row 2 has the id 2 twice.
IDS = torch.tensor([0, 3, 5, 2, 2, 4, 1])
VALUES = torch.tensor([1.0, 0.5, -2.0, 1.0, 3.0, 0.25, 1.0])
OFFSETS = torch.tensor([0, 3, 3, 6, 7])
LABELS = torch.tensor([1.0, 0.0, 0.0, 1.0])


@pytest.fixture
def weights() -> Tensor:
    return torch.randn(NUM_IDS, 1, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def factors() -> Tensor:
    return torch.randn(NUM_IDS, DIM, generator=torch.Generator().manual_seed(2))


def write_rows(table: str, rows: Tensor) -> None:
    RecStoreClient().push(table, torch.arange(NUM_IDS), rows)


def make_fm(name: str, weights: Tensor, factors: Tensor, **options) -> FactorizationMachine:
    model = FactorizationMachine(name, DIM, SGD, **options)
    write_rows(f"{name}/w", weights)
    write_rows(f"{name}/v", factors)
    return model


def fm_by_all_pairs(weights: Tensor, factors: Tensor) -> Tensor:
    """Logits by the definition: every weight, and every pair of features once."""
    logits = []
    for first, last in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True):
        logit = torch.zeros(())
        for i in range(first, last):
            logit = logit + weights[IDS[i], 0] * VALUES[i]
            for j in range(first, i):
                similarity = (factors[IDS[i]] * factors[IDS[j]]).sum()
                logit = logit + similarity * VALUES[i] * VALUES[j]
        logits.append(logit)
    return torch.stack(logits)


def step(model: nn.Module, batch: Batch) -> None:
    """One step of the tables by the store, and of the bias by SGD with the same rate."""
    parameters = list(model.parameters())
    optimizers: list[torch.optim.Optimizer] = [SparseOptimizer(modules=[model])]
    if parameters:
        optimizers.append(torch.optim.SGD(parameters, lr=0.5))
    logits = model(batch.ids, batch.values, batch.offsets)
    binary_cross_entropy_with_logits(logits, batch.labels).backward()
    for optimizer in optimizers:
        optimizer.step()


def test_fm_logits_are_the_sum_over_all_pairs(table_name: TableName, weights: Tensor, factors: Tensor) -> None:
    model = make_fm(table_name(), weights, factors)
    torch.testing.assert_close(model(IDS, VALUES, OFFSETS), fm_by_all_pairs(weights, factors))


def test_lr_logits_are_weighted_sums(table_name: TableName, weights: Tensor) -> None:
    name = table_name()
    model = LogisticRegression(name, SGD)
    write_rows(f"{name}/w", weights)
    expected = fm_by_all_pairs(weights, torch.zeros(NUM_IDS, DIM))
    torch.testing.assert_close(model(IDS, VALUES, OFFSETS), expected)


def test_one_fm_step_equals_autograd_through_the_pairs(table_name: TableName, weights: Tensor, factors: Tensor) -> None:
    name = table_name()
    model = make_fm(name, weights, factors)
    step(model, Batch(IDS, VALUES, OFFSETS, LABELS))

    w, v, b = (t.clone().requires_grad_() for t in (weights, factors, torch.zeros(())))
    binary_cross_entropy_with_logits(fm_by_all_pairs(w, v) + b, LABELS).backward()
    expected = [(t - 0.5 * t.grad).detach() for t in (w, v, b) if t.grad is not None]
    every_id = torch.arange(NUM_IDS)
    stepped = [RecStoreClient().pull(f"{name}/{table}", every_id) for table in ("w", "v")]
    bias = dict(model.named_parameters())["linear.bias"]
    torch.testing.assert_close([*stepped, bias.detach()], expected)


def test_two_fm_steps_equal_those_of_sparse_embeddings(table_name: TableName, weights: Tensor, factors: Tensor) -> None:
    name = table_name()
    model = make_fm(name, weights, factors, bias=False)
    w = nn.Embedding.from_pretrained(weights, freeze=False, sparse=True)
    v = nn.Embedding.from_pretrained(factors, freeze=False, sparse=True)
    sgd = torch.optim.SGD([w.weight, v.weight], lr=0.5)
    every_id = torch.arange(NUM_IDS)
    for _ in range(2):
        step(model, Batch(IDS, VALUES, OFFSETS, LABELS))
        sgd.zero_grad()
        logits = fm_by_all_pairs(w(every_id), v(every_id))
        binary_cross_entropy_with_logits(logits, LABELS).backward()
        sgd.step()
    torch.testing.assert_close(RecStoreClient().pull(f"{name}/v", every_id), v.weight.detach())
    torch.testing.assert_close(RecStoreClient().pull(f"{name}/w", every_id), w.weight.detach())


def test_an_empty_row_has_the_bias_as_its_logit(table_name: TableName) -> None:
    model = FactorizationMachine(table_name(), DIM, SGD)
    bias = model.linear.bias
    assert bias is not None
    bias.data.fill_(0.75)
    none = torch.tensor([], dtype=torch.int64)
    logits = model(none, torch.tensor([]), torch.tensor([0, 0, 0]))
    assert logits.tolist() == [0.75, 0.75]


def test_a_model_without_bias_has_none(table_name: TableName) -> None:
    model = LogisticRegression(table_name(), SGD, bias=False)
    assert model.bias is None
    assert model(IDS, VALUES, OFFSETS).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_evaluation_gives_unknown_ids_no_row(table_name: TableName) -> None:
    name = table_name()
    model = FactorizationMachine(name, DIM, SGD)
    step(model, Batch(IDS, VALUES, OFFSETS, LABELS))
    before = [table_statistics(f"{name}/{table}")["rows"] for table in ("w", "v")]
    evaluate(model, [Batch(IDS + 2**40, VALUES, OFFSETS, LABELS)])
    assert before == [NUM_IDS, NUM_IDS]
    assert [table_statistics(f"{name}/{table}")["rows"] for table in ("w", "v")] == before


def test_factors_start_normal_and_by_the_seed(table_name: TableName) -> None:
    name = table_name()

    def initial_factors(seed: int) -> Tensor:
        model = FactorizationMachine(name, 4, SGD, init_std=0.1, seed=seed)
        rows = model.v(torch.arange(5000)).detach()
        RecStoreClient().drop(f"{name}/v")
        return rows

    rows = initial_factors(seed=7)
    assert torch.equal(rows, initial_factors(seed=7))
    assert not torch.equal(rows, initial_factors(seed=8))
    # 20,000 draws: the standard error of the mean is 0.0007, that of the deviation 0.0005.
    assert rows.mean().item() == pytest.approx(0.0, abs=0.0035)
    assert rows.std().item() == pytest.approx(0.1, abs=0.0025)


def test_a_closed_vocabulary_refuses_other_ids(table_name: TableName) -> None:
    model = LogisticRegression(table_name(), SGD, num_embeddings=5)
    with pytest.raises(IndexError, match="5"):
        model(IDS, VALUES, OFFSETS)
