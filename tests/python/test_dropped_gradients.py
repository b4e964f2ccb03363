"""Batches that are thrown away: every way that drops the gradient of `nn.Embedding` drops that of a table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from module_kinds import IDS, NUM, OPTIONS, Pair, each_kind, pair
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from recstore_ops import DistEmbedding, SparseOptimizer

__all__ = ["pair"]

pytestmark = pytest.mark.tier("test")

Drop = Callable[[nn.Module, nn.Module], object]


def _by_hand(model: nn.Module, module: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = None


def _zeroed(model: nn.Module, module: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def _outer(**options: bool) -> Drop:
    return lambda model, module: torch.optim.SGD(model.parameters(), lr=1.0, **options).zero_grad()


WAYS: dict[str, Drop] = {
    "model.zero_grad": lambda model, module: model.zero_grad(),
    "module.zero_grad": lambda model, module: module.zero_grad(),
    "model.zero_grad to zeros": lambda model, module: model.zero_grad(set_to_none=False),
    "grad = None": _by_hand,
    "grad.zero_": _zeroed,
    "optimizer.zero_grad": _outer(),
    "optimizer.zero_grad to zeros": lambda model, module: torch.optim.SGD(model.parameters()).zero_grad(False),
    "optimizer.zero_grad to zeros, foreach": lambda model, module: torch.optim.SGD(
        model.parameters(), foreach=True
    ).zero_grad(False),
}


@each_kind
@pytest.mark.parametrize("drop", WAYS.values(), ids=WAYS.keys())
def test_a_dropped_batch_changes_no_row(pair: Pair, drop: Drop) -> None:
    pair.backward(1000.0)
    assert [parameter.grad is None for parameter in pair.module.parameters()] == [False]
    drop(pair.model, pair.module)
    drop(pair.rival_model, pair.rival)
    assert [parameter.grad for parameter in pair.module.parameters()] == [None]
    pair.step()
    pair.assert_equal_rows()
    assert not pair.rows().any()

    pair.backward()
    pair.step()
    pair.assert_equal_rows()
    assert pair.rows()[1].tolist() == [-1.0, -1.0]


@each_kind
def test_lent_gradients_are_dropped_too(pair: Pair) -> None:
    pair.backward()
    assert pair.optimizer.clip_grad_norm_(0.1) > 0
    pair.model.zero_grad()
    pair.optimizer.step()
    assert not pair.rows().any()


def test_the_weight_takes_grad_none(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, 2, table_name(), **OPTIONS)
    module(IDS).sum().backward()
    module.weight.grad = None
    assert module._trace == []


OPTIMIZERS: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, centered=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@each_kind
def test_an_optimizer_of_all_parameters_steps_the_dense_ones(
    pair: Pair, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    ours, alone = make(list(pair.model.parameters())), make(list(pair.rival_top.parameters()))
    with torch.no_grad():
        pair.rival_top.bias.copy_(pair.top.bias)
    for _ in range(2):
        pair.backward()
        torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1e6, float("inf"))
        ours.step()
        alone.step()
    for own, other in zip(pair.top.parameters(), pair.rival_top.parameters(), strict=True):
        assert torch.equal(own, other)
    state = ours.state_dict()["state"].values()
    assert all(type(value) is torch.Tensor for slots in state for value in slots.values() if value is not None)
    pair.step()
    pair.assert_equal_rows()


def test_what_goes_through_all_parameters_leaves_tables_alone(table_name: Callable[[], str]) -> None:
    module, top = DistEmbedding(NUM, 2, table_name(), **OPTIONS), nn.Linear(2, 1)
    model = nn.Sequential(module, top)
    optimizer = SparseOptimizer(modules=[module])
    lbfgs = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = (model(IDS) - 1).square().sum()
        loss.backward()
        return loss

    assert lbfgs.step(closure) > (model(IDS) - 1).square().sum()
    optimizer.zero_grad()
    with pytest.raises(AttributeError, match='has no "view": weight'):
        nn.utils.parameters_to_vector(model.parameters())
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    parameters = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match='has no "functional_call": rows are averaged'):
        torch.func.functional_call(model, parameters, (IDS,))
    assert not module.weight[torch.arange(NUM)].any()


def test_zero_grad_without_modules_needs_no_first_step(table_name: Callable[[], str]) -> None:
    optimizer = SparseOptimizer()
    module, of_another = (DistEmbedding(NUM, 2, table_name(), **OPTIONS) for _ in range(2))
    another = SparseOptimizer(modules=[of_another])
    for each in (module, of_another):
        each(IDS).sum().backward()
    optimizer.zero_grad()
    assert module._trace == []
    assert len(of_another._trace) == 1
    another.step()
    assert of_another.weight[1].tolist() == [-1.0, -1.0]


def test_zero_grad_without_modules_leaves_what_another_such_optimizer_steps(table_name: Callable[[], str]) -> None:
    first, second = SparseOptimizer(), SparseOptimizer()
    modules = [DistEmbedding(NUM, 2, table_name(), **OPTIONS) for _ in range(2)]
    for optimizer, module in zip((first, second), modules, strict=True):
        optimizer.step([module])
        module(IDS).sum().backward()
    first.zero_grad()
    assert [len(module._trace) for module in modules] == [0, 1]


@pytest.mark.parametrize("with_modules", [False, True])
def test_another_parameter_group_is_refused_at_once(with_modules: bool, table_name: Callable[[], str]) -> None:
    module, dense = DistEmbedding(NUM, 2, table_name(), **OPTIONS), nn.Linear(2, 1)
    optimizer = SparseOptimizer(modules=[module]) if with_modules else SparseOptimizer()
    groups = len(optimizer.param_groups)
    for params in (dense.parameters(), list(dense.parameters()), dense.weight, module.parameters(), [module], module):
        with pytest.raises(ValueError, match=r"no parameter groups: give modules at construction.*torch\.optim"):
            optimizer.add_param_group({"params": params})
    with pytest.raises(ValueError, match="SparseOptimizer takes modules and tables, got Parameter"):
        SparseOptimizer(modules=dense.parameters())  # type: ignore[arg-type]
    assert len(optimizer.param_groups) == groups


def test_the_step_keeps_what_is_collected_after_a_clearing(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, 2, table_name(), **OPTIONS)
    top = nn.Linear(2, 1, bias=False)
    model = nn.Sequential(module, top)
    nn.init.ones_(top.weight)
    optimizer = SparseOptimizer(modules=[model])
    (model(torch.tensor([1])).sum() * 1000).backward()
    model.zero_grad()
    model(torch.tensor([2])).sum().backward()
    optimizer.step()
    assert module.weight[[1, 2]].tolist() == [[0.0, 0.0], [-1.0, -1.0]]
