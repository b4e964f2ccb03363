"""Functions of torch over the gradients of `model.parameters()`: tables as `nn.Embedding`, or one sentence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from module_kinds import IDS, NUM, OPTIONS, Pair, each_kind, pair
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from recstore_ops import DistEmbedding, SparseOptimizer

__all__ = ["pair"]

pytestmark = pytest.mark.tier("test")

Change = Callable[[nn.Module], object]


def _grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _times(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.25
            parameter.grad /= 2


def _each(change: Callable[[Tensor], object]) -> Change:
    def changed(model: nn.Module) -> None:
        for grad in _grads(model):
            change(grad)

    return changed


def _by_several(model: nn.Module) -> None:
    grads = _grads(model)
    torch._foreach_mul_(grads, [0.5, *[3.0] * (len(grads) - 1)])  # type: ignore[attr-defined]


def _clipped(**options: Any) -> Change:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), **options)


def _clipped_by_total(model: nn.Module) -> None:
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, nn.utils.get_total_norm(_grads(model)))


CHANGES: dict[str, Change] = {
    "clip_grad_norm_": _clipped(max_norm=0.5),
    "clip_grad_norm_ that keeps": _clipped(max_norm=1e6),
    "clip_grad_norm_, order 1": _clipped(max_norm=0.5, norm_type=1.0),
    "clip_grad_norm_, greatest": _clipped(max_norm=0.5, norm_type=math.inf),
    "clip_grad_norm_, foreach": _clipped(max_norm=0.5, foreach=True),
    "clip_grad_norm_, single": _clipped(max_norm=0.5, foreach=False),
    "clip_grads_with_norm_": _clipped_by_total,
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.3),
    "clip_grad_value_, foreach": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=True),
    "*=": _times,
    "mul_": _each(lambda grad: grad.mul_(torch.tensor(0.5))),
    "data.div_": _each(lambda grad: grad.data.div_(3)),
    "detach().clamp_": _each(lambda grad: grad.detach().clamp_(max=0.25)),
    "_foreach_mul_ by several": _by_several,
}

MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda grad: grad.norm(),
    "data.norm": lambda grad: grad.data.norm(1),
    "torch.norm": lambda grad: torch.norm(grad),
    "linalg.norm": lambda grad: torch.linalg.norm(grad.flatten() if grad.dim() > 1 else grad),
    "vector_norm": lambda grad: torch.linalg.vector_norm(grad, math.inf),
    "isnan": lambda grad: grad.isnan().any(),
    "isfinite": lambda grad: torch.isfinite(grad).all(),
    "isinf": lambda grad: torch.isinf(grad).any(),
}


@each_kind
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_gradients_are_changed_as_those_of_torch(pair: Pair, change: Change) -> None:
    pair.backward(3.0)
    pair.backward(-5.0)
    found, expected = change(pair.model), change(pair.rival_model)
    if expected is not None:
        torch.testing.assert_close(found, expected)
    pair.step()
    pair.assert_equal_rows()
    assert pair.rows().any()
    for own, other in zip(pair.top.parameters(), pair.rival_top.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@each_kind
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES.keys())
@pytest.mark.parametrize("factor", [3.0, math.inf, math.nan])
def test_gradients_are_measured_as_those_of_torch(
    pair: Pair, measure: Callable[[Tensor], Tensor], factor: float
) -> None:
    pair.backward(factor)
    (own,), (other,) = _grads(pair.module), _grads(pair.rival)
    torch.testing.assert_close(measure(own), measure(other), equal_nan=True, check_dtype=False)


@each_kind
def test_unscaled_gradients_are_clipped_by_one_norm(pair: Pair) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    dense = torch.optim.SGD([*pair.module.parameters(), *pair.top.parameters()], lr=1.0)
    pair.backward(8.0)
    for grad in _grads(pair.rival_model):
        grad.div_(8.0)
    scaler.scale(torch.ones(()))
    for optimizer in (dense, pair.optimizer):
        scaler.unscale_(optimizer)
    norms = [_clipped(max_norm=0.5)(model) for model in (pair.model, pair.rival_model)]
    torch.testing.assert_close(*norms)
    for optimizer in (dense, pair.optimizer):
        scaler.step(optimizer)
    pair.step_rival()
    pair.assert_equal_rows()


def test_a_gradient_that_was_dropped_meanwhile_has_no_norm(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, 2, table_name(), **OPTIONS)
    module(IDS).sum().backward()
    (grad,) = _grads(module)
    module.zero_grad()
    for asked in (Tensor.norm, Tensor.isnan, lambda grad: grad.mul_(2), Tensor.clone):
        with pytest.raises(RuntimeError, match=r"a step applied it, or it was dropped: p.grad.clone\(\) keeps"):
            asked(grad)
    assert _grads(module) == []
    module(IDS).sum().backward()
    parameter: Any = next(module.parameters())
    with pytest.raises(AttributeError, match='has no "grad": backward collects'):
        parameter.grad = grad
    parameter.grad.zero_()
    assert parameter.grad is None


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda grad: grad.add_(1.0),
    "copy_": lambda grad: grad.copy_(torch.ones(())),
    "normal_": lambda grad: grad.normal_(),
    "fill_": lambda grad: grad.data.fill_(1.0),
    "__setitem__": lambda grad: grad.__setitem__(..., 1.0),
    "_foreach_add_": lambda grad: torch._foreach_add_([torch.ones(()), grad], 1.0),  # type: ignore[attr-defined]
    "_foreach_sqrt_": lambda grad: torch._foreach_sqrt_([grad]),  # type: ignore[attr-defined]
}


@each_kind
@pytest.mark.parametrize("function", REFUSED)
def test_other_changes_in_place_are_refused_and_change_nothing(pair: Pair, function: str) -> None:
    pair.backward()
    (grad,) = _grads(pair.module)
    message = rf'"{function}" of the gradient of the parameter of \w+ over table ".*": it stands for what the table'
    with pytest.raises(RuntimeError, match=message):
        REFUSED[function](grad)
    pair.step()
    pair.assert_equal_rows()


def test_what_several_modules_collected_is_scaled_but_has_no_norm_of_parts(table_name: Callable[[], str]) -> None:
    name = table_name()
    first, second = (DistEmbedding(NUM, 2, name, **OPTIONS) for _ in range(2))
    modules = nn.ModuleList([first, second])
    optimizer = SparseOptimizer(modules=[first, second])
    for module in modules:
        module(torch.tensor([1])).sum().backward()
    for way in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with pytest.raises(RuntimeError, match="other modules have collected for it too"):
            way(modules.parameters(), 0.1)
    for grad in _grads(modules):
        grad.mul_(0.5)
    optimizer.step()
    assert first.weight[[1]].tolist() == [[-1.0, -1.0]]


def test_a_sharded_table_says_which_function_sees_all_ranks(
    table_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = DistEmbedding(NUM, 2, table_name(), **OPTIONS)
    module(IDS).sum().backward()
    with monkeypatch.context() as patched:
        patched.setattr(type(module.table), "is_sharded", True)
        for way in (
            partial(nn.utils.clip_grad_norm_, max_norm=1.0),
            partial(nn.utils.clip_grad_value_, clip_value=1.0),
        ):
            with pytest.raises(RuntimeError, match=r"SparseOptimizer\.clip_grad_norm_ clips by the norm over all"):
                way(module.parameters())


@pytest.mark.parametrize("norm", [lambda p: p.square().sum(), lambda p: p.norm(), lambda p: (p**2).mean()])
def test_a_penalty_on_all_parameters_is_refused(norm: Callable[[Any], Any], table_name: Callable[[], str]) -> None:
    model = nn.ModuleList([nn.Linear(2, 1), DistEmbedding(NUM, 2, table_name(), **OPTIONS)])
    with pytest.raises(AttributeError, match=r'over table ".*" has no "(square|norm|pow)": weight'):
        sum(norm(parameter) for parameter in model.parameters())


def _optimizers() -> list[Any]:
    found = [each for each in vars(torch.optim).values() if inspect.isclass(each)]
    # These take no dense gradients, no scalars, or a closure.
    others = {torch.optim.Optimizer, torch.optim.SparseAdam, torch.optim.LBFGS, getattr(torch.optim, "Muon", None)}
    return [each for each in found if each not in others]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"maximize": True, "weight_decay": 0.1, "foreach": True}])
@pytest.mark.parametrize("make", _optimizers())
def test_every_optimizer_of_torch_steps_the_dense_parameters(
    table_name: Callable[[], str], make: Any, options: dict[str, Any]
) -> None:
    taken = inspect.signature(make).parameters
    options = {name: value for name, value in options.items() if name in taken}
    module, top, alone = DistEmbedding(NUM, 2, table_name(), **OPTIONS), nn.Linear(2, 1), nn.Linear(2, 1)
    alone.load_state_dict(top.state_dict())
    _sparse = SparseOptimizer(modules=[module])
    optimizers = [make([*module.parameters(), *top.parameters()], **options), make(alone.parameters(), **options)]
    for _ in range(2):
        for layer in (top, alone):
            layer.zero_grad()
            layer(module(IDS) + 1).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, top.parameters(), alone.parameters()))
    assert not module.weight[torch.arange(NUM)].any()
