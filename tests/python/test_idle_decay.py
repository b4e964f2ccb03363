"""`catch_up`: rows that a step leaves alone decay, or move on, as those of dense optimizers do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import drop_all_tables
from torch import Tensor, nn

from recstore_ops import DistEmbedding, DistEmbeddingBag, RecStoreClient, SparseOptimizer, checkpoint

pytestmark = pytest.mark.tier("test")

NUM, DIM, STEPS = 30, 4, 60
ALL = torch.arange(NUM)


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


def rule(kind: str, **options: Any) -> dict[str, Any]:
    return {"kind": kind, "lr": 0.1, "weight_decay": 0.2, "catch_up": True, **options}


def table(name: str, optimizer: dict[str, Any], **options: Any) -> DistEmbedding:
    """A module whose rows are all there."""
    module = DistEmbedding(NUM, DIM, name, optimizer=optimizer, **options)
    module.weight[ALL] = torch.randn(NUM, DIM, generator=torch.Generator().manual_seed(1))
    return module


def batch(step: int) -> Tensor:
    return torch.randint(NUM, (5,), generator=torch.Generator().manual_seed(step))


def loss_of(module: nn.Module, step: int) -> Tensor:
    return (module(batch(step)) - 1).square().sum()


def test_a_share_above_one_makes_rows_without_a_gradient_zero(name: str) -> None:
    ours = table(name, rule("sgd", lr=5.0, weight_decay=0.3))
    before = ours.weight[ALL]
    ours(ALL[:1]).backward(torch.zeros(1, DIM))
    SparseOptimizer(modules=[ours]).step()
    assert torch.allclose(ours.weight[[0]], -0.5 * before[:1])  # As dense SGD does.
    assert ours.weight[ALL[1:]].eq(0).all()


def test_sgd_is_that_of_torch_with_dense_gradients_on_every_row(name: str) -> None:
    ours = table(name, rule("sgd"))
    dense = nn.Embedding.from_pretrained(ours.weight[ALL], freeze=False)
    steppers = [SparseOptimizer(modules=[ours]), torch.optim.SGD(dense.parameters(), lr=0.1, weight_decay=0.2)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(stepper, 0.97) for stepper in steppers]
    for step in range(STEPS):
        for module, stepper, scheduler in zip((ours, dense), steppers, schedulers, strict=True):
            stepper.zero_grad()
            loss_of(module, step).backward()
            stepper.step()
            scheduler.step()
        assert torch.allclose(ours.weight[ALL], dense.weight, rtol=0, atol=1e-5), f"step {step}"
        assert torch.allclose(ours(ALL[:7]), dense(ALL[:7]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_torch_with_dense_gradients_on_every_row(nesterov: bool, name: str) -> None:
    options = {"lr": 0.02, "momentum": 0.8, "nesterov": nesterov}
    ours = table(name, {"kind": "sgd", "catch_up": True, **options})
    dense = nn.Embedding.from_pretrained(ours.weight[ALL], freeze=False)
    steppers = [SparseOptimizer(modules=[ours]), torch.optim.SGD(dense.parameters(), **options)]
    for step in range(STEPS):
        for module, stepper in zip((ours, dense), steppers, strict=True):
            stepper.zero_grad()
            loss_of(module, step).backward()
            stepper.step()
        assert torch.allclose(ours.weight[ALL], dense.weight, rtol=0, atol=1e-5), f"step {step}"


def test_adamw_decays_every_row_and_moves_those_with_a_gradient(name: str) -> None:
    ours = table(name, rule("adamw", betas=(0.9, 0.99), eps=1e-3))
    weight = ours.weight[ALL].double().numpy()
    first, second = np.zeros((NUM, DIM)), np.zeros((NUM, DIM))
    stepper = SparseOptimizer(modules=[ours])
    for step in range(1, STEPS + 1):
        gradient = np.zeros((NUM, DIM))
        np.add.at(gradient, batch(step).numpy(), 2 * (weight[batch(step).numpy()] - 1))
        stepper.zero_grad()
        loss_of(ours, step).backward()
        stepper.step()
        weight *= 1 - 0.1 * 0.2
        own = batch(step).unique().numpy()
        first[own] = 0.9 * first[own] + 0.1 * gradient[own]
        second[own] = 0.99 * second[own] + 0.01 * gradient[own] ** 2
        root = np.sqrt(second[own] / (1 - 0.99**step)) + 1e-3
        weight[own] -= 0.1 * first[own] / (1 - 0.9**step) / root
        assert np.abs(ours.weight[ALL].numpy() - weight).max() < 1e-4, f"step {step}"


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lion"])
def test_without_it_idle_rows_stay(kind: str, name: str) -> None:
    for catches_up in (False, True):
        module = table(f"{name}/{catches_up}", rule(kind, catch_up=catches_up))
        before = module.weight[ALL]
        for _ in range(3):
            module(torch.tensor([0])).sum().backward()
            SparseOptimizer(modules=[module]).step()
        expected = before[1:] * (0.98**3 if catches_up else 1)
        assert torch.allclose(module.weight[ALL[1:]], expected, rtol=1e-6, atol=0)


def test_bags_and_prefetched_rows_are_caught_up_with(name: str) -> None:
    module = table(name, rule("sgd"))
    bags = DistEmbeddingBag(NUM, DIM, name, optimizer=rule("sgd"), mode="sum", on_existing="share")
    for step in range(5):
        loss_of(module, step).backward()
        SparseOptimizer(modules=[module]).step()
    rows = module.weight[ALL]
    assert torch.allclose(bags(ALL.view(6, 5)), rows.view(6, 5, DIM).sum(1), atol=1e-6)
    client = RecStoreClient()
    assert torch.equal(client.wait_and_get(client.prefetch(ALL, name), DIM), rows)


def test_a_run_that_goes_on_from_a_checkpoint_is_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    def go_on(module: DistEmbedding, steps: range) -> Tensor:
        for step in steps:
            loss_of(module, step).backward()
            SparseOptimizer(modules=[module]).step()
        return module.weight[ALL]

    module = table(name, rule("sgd"))
    go_on(module, range(10))
    checkpoint.save(tmp_path)
    expected = go_on(module, range(10, 20))
    checkpoint.load(tmp_path)
    assert torch.equal(go_on(module, range(10, 20)), expected)


def test_state_dicts_hold_what_the_steps_left(name: str) -> None:
    module = table(name, rule("sgd"))
    stepper = SparseOptimizer(modules=[module])
    for step in range(10):
        loss_of(module, step).backward()
        stepper.step()
    rows, states = module.weight[ALL], copy.deepcopy([module.state_dict(), stepper.state_dict()])
    for step in range(7):
        loss_of(module, step).backward()
        stepper.step()
    module.load_state_dict(states[0])
    stepper.load_state_dict(states[1])
    assert torch.equal(module.weight[ALL], rows)
    loss_of(module, 10).backward()
    stepper.step()
    idle = [row for row in range(NUM) if row not in batch(10)]
    assert torch.allclose(module.weight[idle], rows[idle] * 0.98, rtol=1e-6, atol=0)


def test_rows_on_disk_are_caught_up_with(name: str, tmp_path: Path) -> None:
    places: list[dict[str, Any]] = [{}, {"memory_limit": 26_000, "disk": str(tmp_path), "block_size": 4}]
    found = []
    for place in places:
        module = DistEmbedding(500, DIM, name, optimizer=rule("sgd"), **place)
        for step in range(20):
            ids = torch.arange(step * 25, step * 25 + 50).clamp(max=499)
            module(ids).square().sum().backward()
            SparseOptimizer(modules=[module]).step()
        found.append(module.weight[torch.arange(500)])
        drop_all_tables()
    assert torch.equal(*found)
