"""Clipping and mixed precision: what was collected is scaled as the gradients of `torch.nn.Embedding` are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from recstore_ops import DistEmbedding, DistEmbeddingBag, SparseOptimizer, table_statistics

pytestmark = pytest.mark.tier("test")

NUM_IDS, DIM, LR = 20, 4, 0.05
IDS = torch.tensor([[3, 7, 3], [11, 3, 0]])

TableName = Callable[[], str]


@dataclass
class Pair:
    """A table and the torch embedding that starts with the same rows, each with its optimizer."""

    ours: DistEmbedding
    theirs: nn.Embedding
    our_optimizer: SparseOptimizer
    their_optimizer: torch.optim.SGD

    def backward(self, ids: Tensor, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
        for module in (self.ours, self.theirs):
            scale((module(ids) ** 3).sum()).backward()

    def assert_equal_rows(self) -> None:
        rows = self.ours(torch.arange(NUM_IDS)).detach()
        # A few roundings of rows of order 1.
        torch.testing.assert_close(rows, self.theirs.weight.detach(), rtol=0, atol=1e-6)


@pytest.fixture
def pair(table_name: TableName) -> Pair:
    ours = DistEmbedding(NUM_IDS, DIM, table_name(), optimizer={"kind": "sgd", "lr": LR}, initializer="uniform")
    weight = ours(torch.arange(NUM_IDS)).detach().clone()
    theirs = nn.Embedding(NUM_IDS, DIM, sparse=True, _weight=weight)
    return Pair(ours, theirs, SparseOptimizer(modules=[ours]), torch.optim.SGD(theirs.parameters(), lr=LR))


def clip_in_torch(weight: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Clips a coalesced sparse gradient, which torch's own function takes by its values only."""
    assert weight.grad is not None
    weight.grad = weight.grad.coalesce()
    values = torch.zeros_like(weight.grad.values())
    values.grad = weight.grad.values()
    return nn.utils.clip_grad_norm_([values], max_norm, norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_agrees_with_torch_on_the_coalesced_gradient(pair: Pair, max_norm: float, norm_type: float) -> None:
    pair.backward(IDS)
    pair.backward(IDS[:1])

    ours = pair.our_optimizer.clip_grad_norm_(max_norm, norm_type)
    theirs = clip_in_torch(pair.theirs.weight, max_norm, norm_type)

    torch.testing.assert_close(ours, theirs)
    assert pair.theirs.weight.grad is not None
    ((ids, grads),) = pair.ours._trace
    assert torch.equal(ids, pair.theirs.weight.grad.indices()[0])
    torch.testing.assert_close(grads, pair.theirs.weight.grad.values())
    pair.our_optimizer.step()
    pair.their_optimizer.step()
    pair.assert_equal_rows()


def test_the_norm_is_over_all_tables_and_merges_modules_that_share_one(table_name: TableName) -> None:
    shared = table_name()
    options = {"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": "zeros"}
    first, second = (DistEmbedding(None, 1, shared, **options) for _ in range(2))
    other = DistEmbeddingBag(None, 1, table_name(), mode="sum", **options)
    optimizer = SparseOptimizer(modules=[first, second, other])
    (first(torch.tensor([5])) * 1 + second(torch.tensor([5])) * 2 + other(torch.tensor([[9]])) * 4).sum().backward()

    norm = optimizer.clip_grad_norm_(2.5)
    optimizer.step()

    assert norm.item() == pytest.approx(5.0)  # of (1 + 2, 4)
    assert first(torch.tensor([5])).item() == pytest.approx(-1.5)
    assert other(torch.tensor([[9]])).item() == pytest.approx(-2.0)


def test_clipping_may_be_about_some_modules_only(table_name: TableName) -> None:
    clipped, kept = (DistEmbedding(None, 1, table_name(), initializer="zeros") for _ in range(2))
    (clipped(torch.tensor([5])) + kept(torch.tensor([5]))).sum().backward()

    SparseOptimizer().clip_grad_norm_(0.25, modules=[clipped])

    assert clipped._trace[0][1].item() == pytest.approx(0.25)
    assert kept._trace[0][1].item() == 1.0


def test_one_norm_over_dense_and_sparse_gradients(pair: Pair) -> None:
    dense = nn.Linear(DIM, 1)
    for module in (pair.ours, pair.theirs):
        dense.zero_grad()
        dense(module(IDS)).sum().backward()
    assert pair.theirs.weight.grad is not None
    expected = torch.cat([pair.theirs.weight.grad.coalesce().values().flatten(), *map(_flat_grad, dense.parameters())])

    sparse = [parameter for group in pair.our_optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.clip_grad_norm_([*sparse, *dense.parameters()], 1.0)

    torch.testing.assert_close(norm, expected.norm())
    clipped = torch.cat([pair.ours._trace[0][1].flatten(), *map(_flat_grad, dense.parameters())])
    torch.testing.assert_close(clipped.norm(), torch.tensor(1.0))


def _flat_grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.flatten()


def test_clipping_without_gradients_gives_zero(pair: Pair) -> None:
    assert pair.our_optimizer.clip_grad_norm_(1.0).item() == 0.0


def test_clipping_refuses_a_norm_that_is_not_finite_where_asked(pair: Pair) -> None:
    pair.backward(IDS, lambda loss: loss * math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        pair.our_optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_clipping_needs_modules() -> None:
    with pytest.raises(ValueError, match="clip_grad_norm_ needs modules"):
        SparseOptimizer().clip_grad_norm_(1.0)


def test_gradients_collected_after_clipping_are_added_to_it(table_name: TableName) -> None:
    module = DistEmbedding(None, 1, table_name(), initializer="zeros", optimizer={"kind": "sgd", "lr": 1.0})
    optimizer = SparseOptimizer(modules=[module])
    module(torch.tensor([5])).sum().backward()
    optimizer.clip_grad_norm_(0.5)
    module(torch.tensor([5, 6])).sum().backward()
    optimizer.step()
    assert module(torch.tensor([5, 6])).flatten().tolist() == pytest.approx([-1.5, -1.0])
    assert table_statistics(module.name)["step"] == 1


def test_zero_grad_forgets_clipped_gradients(pair: Pair) -> None:
    pair.backward(IDS)
    pair.our_optimizer.clip_grad_norm_(1.0)
    pair.our_optimizer.zero_grad()
    assert pair.ours._trace == []
    pair.our_optimizer.step()
    pair.assert_equal_rows()


@pytest.mark.parametrize("explicit", [True, False], ids=["unscale_", "step alone"])
def test_a_grad_scaler_trains_as_on_torch(pair: Pair, explicit: bool) -> None:
    optimizers = (pair.our_optimizer, pair.their_optimizer)
    scalers = [GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in optimizers]
    for _ in range(5):
        for module, optimizer, scaler in zip((pair.ours, pair.theirs), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale((module(IDS) ** 3).sum()).backward()
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4096.0
    pair.assert_equal_rows()


def test_unscaling_divides_what_was_collected(pair: Pair) -> None:
    scaler = GradScaler("cpu", init_scale=64.0)
    pair.backward(IDS, scaler.scale)
    scaled = pair.ours._trace[0][1].clone()
    scaler.unscale_(pair.our_optimizer)
    assert torch.equal(pair.ours._trace[0][1], scaled / 64)


def test_clipping_after_unscaling_works_on_unscaled_gradients(pair: Pair) -> None:
    pair.backward(IDS)
    expected = pair.our_optimizer.clip_grad_norm_(math.inf)
    pair.our_optimizer.zero_grad()
    scaler = GradScaler("cpu", init_scale=64.0)
    pair.backward(IDS, scaler.scale)
    scaler.unscale_(pair.our_optimizer)
    torch.testing.assert_close(pair.our_optimizer.clip_grad_norm_(0.5), expected)
    scaler.step(pair.our_optimizer)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("nan_policy", ["error", "skip", "allow"])
def test_a_step_with_infinite_gradients_is_left_out_and_touches_no_row(
    nan_policy: str, value: float, table_name: TableName
) -> None:
    finite, infinite = (DistEmbedding(None, DIM, table_name(), nan_policy=nan_policy) for _ in range(2))
    optimizer = SparseOptimizer(modules=[finite, infinite])
    scaler = GradScaler("cpu", init_scale=64.0)
    for factor in (value, 1.0):
        optimizer.zero_grad()
        scaler.scale(finite(IDS).sum() + (infinite(IDS) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        for module in (finite, infinite):
            statistics = table_statistics(module.name)
            assert (statistics["step"], statistics["rows"]) == ((1, 4) if factor == 1.0 else (0, 0))
            assert statistics["refusals"] == 0
    assert scaler.get_scale() == 32.0


def test_a_disabled_scaler_steps_as_usual(pair: Pair) -> None:
    scaler = GradScaler("cpu", enabled=False)
    pair.backward(IDS, scaler.scale)
    for optimizer in (pair.our_optimizer, pair.their_optimizer):
        scaler.step(optimizer)
    pair.assert_equal_rows()


def test_a_scaler_needs_the_modules_at_construction(pair: Pair) -> None:
    scaler = GradScaler("cpu")
    pair.backward(IDS, scaler.scale)
    with pytest.raises(ValueError, match="only with modules at construction"):
        scaler.step(SparseOptimizer(), modules=[pair.ours])


def test_a_scaler_with_nothing_collected_says_what_torch_says(pair: Pair) -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    for optimizer in (pair.our_optimizer, pair.their_optimizer):
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)


ORDERS: dict[str, Callable[[GradScaler, torch.optim.Optimizer, SparseOptimizer], object]] = {
    "dense before": lambda scaler, dense, sparse: (scaler.step(dense), scaler.step(sparse)),
    "dense behind": lambda scaler, dense, sparse: (scaler.step(sparse), scaler.step(dense)),
    "unscaled before": lambda scaler, dense, sparse: (
        *(scaler.unscale_(sparse), scaler.unscale_(dense)),
        *(scaler.step(dense), scaler.step(sparse)),
    ),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_scaler_has_two_optimizers_in_any_order(
    order: Callable[[GradScaler, torch.optim.Optimizer, SparseOptimizer], object], pair: Pair
) -> None:
    """The dense optimizer has all parameters, the stand-in of the table among them."""
    weight = nn.Parameter(torch.ones(1))
    dense = torch.optim.SGD([*pair.ours.parameters(), weight], lr=LR)
    for _ in range(3):
        scaler = GradScaler("cpu", init_scale=1024.0)
        scaler.scale((pair.ours(IDS) ** 3).sum() + weight.sum()).backward()
        (pair.theirs(IDS) ** 3).sum().backward()
        order(scaler, dense, pair.our_optimizer)
        pair.their_optimizer.step()
        for each in (dense, pair.their_optimizer):
            each.zero_grad()
    assert torch.allclose(weight, torch.tensor(1 - 3 * LR))
    pair.assert_equal_rows()


def test_a_scaler_that_has_the_dense_optimizer_alone_is_refused_before_a_row_changes(pair: Pair) -> None:
    weight = nn.Parameter(torch.ones(1))
    dense = torch.optim.SGD([*pair.ours.parameters(), weight], lr=LR)
    before = pair.ours(IDS).detach()
    for _ in range(2):
        scaler = GradScaler("cpu", init_scale=1024.0)
        scaler.scale(pair.ours(IDS).sum() + weight.sum()).backward()
        scaler.step(dense)
        [(_, grads)] = pair.ours._trace
        with pytest.raises(RuntimeError, match=f'"{pair.ours.name}": its gradients are still scaled.*scaler.step'):
            pair.our_optimizer.step()
        assert torch.equal(pair.ours(IDS), before)
        assert torch.equal(pair.ours._trace[0][1], grads)
        pair.our_optimizer.zero_grad()
        dense.zero_grad()
    pair.ours(IDS).sum().backward()
    pair.our_optimizer.step()  # Without a scaler it goes on.
    assert not torch.equal(pair.ours(IDS), before)
