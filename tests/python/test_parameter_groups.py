"""The parameter groups of `SparseOptimizer`: what is refused in them, and what schedulers write there."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_kinds import FORMS
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from recstore_ops import DistEmbedding, SparseOptimizer, table_statistics

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]
IDS = torch.tensor([1, 2])


def collected(name: str, **options: Any) -> DistEmbedding:
    """A module that has collected a gradient of 1 for two ids."""
    module = DistEmbedding(None, 1, name, initializer="zeros", **options)
    module(IDS).sum().backward()
    return module


def keys_of_torch() -> set[str]:
    """The keys of the groups of all optimizers of torch."""
    found: set[str] = set()
    for kind in vars(torch.optim).values():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found |= kind([nn.Parameter(torch.zeros(2, 2))]).param_groups[0].keys()  # type: ignore[call-arg]
    return found


FIXED = sorted(keys_of_torch().union(*FORMS) - {"params", "lr"})


@pytest.mark.parametrize("at_construction", [True, False])
@pytest.mark.parametrize("key", FIXED)
def test_a_hyper_parameter_that_no_step_reads_is_refused(
    key: str, at_construction: bool, table_name: TableName
) -> None:
    module = collected(table_name(), optimizer="adam")
    optimizer = SparseOptimizer(modules=[module] if at_construction else None)
    before, state = set(optimizer.param_groups[0]), copy.deepcopy(optimizer.state_dict())
    table = f'table "{module.name}": ' if at_construction else ""

    optimizer.param_groups[0][key] = 0.25
    with pytest.raises(
        ValueError, match=f"^{re.escape(table)}a parameter group of SparseOptimizer has {key}=0.25, and only"
    ):
        optimizer.step([module])
    assert (table_statistics(module.name)["step"], len(module._trace)) == (0, 1)

    state["param_groups"][0][key] = 0.25
    del optimizer.param_groups[0][key]
    with pytest.raises(ValueError, match=f"has {key}=0.25"):
        optimizer.load_state_dict(state)
    assert set(optimizer.param_groups[0]) == before
    optimizer.step([module])
    assert table_statistics(module.name)["step"] == 1


@pytest.mark.parametrize("key", ["name", "swa_lr", "lr_scale", "param_names"])
def test_notes_of_a_program_stay(key: str, table_name: TableName) -> None:
    module = collected(table_name())
    optimizer = SparseOptimizer(modules=[module])
    optimizer.param_groups[0][key] = "a note"
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert copy.deepcopy(optimizer).param_groups[0][key] == "a note"


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1)),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.5),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.5),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 4),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, 2, cycle_momentum=False),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, 6, cycle_momentum=False),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("at_construction", [True, False])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_sets_rates_as_in_torch(kind: str, at_construction: bool, table_name: TableName) -> None:
    module = DistEmbedding(None, 1, table_name(), lr=0.25)
    rival = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.25)
    ours = SparseOptimizer(lr=0.25, modules=[module] if at_construction else None)
    schedulers = [SCHEDULERS[kind](ours), SCHEDULERS[kind](rival)]
    for _ in range(4):
        module(IDS).sum().backward()
        for optimizer in (ours, rival):
            optimizer.step(*([[module]] if optimizer is ours else []))  # type: ignore[call-overload]
        for scheduler in schedulers:
            scheduler.step()
        rates = [optimizer.param_groups[0]["lr"] for optimizer in (ours, rival)]
        assert rates[0] == pytest.approx(rates[1])


@pytest.mark.parametrize("kind", [lr_scheduler.CyclicLR, lr_scheduler.OneCycleLR])
def test_a_scheduler_that_cycles_momentum_is_refused(kind: Any, table_name: TableName) -> None:
    optimizer = SparseOptimizer(modules=[collected(table_name(), optimizer="adam")])
    with pytest.raises(ValueError, match="must support momentum"):
        kind(optimizer, *((0.1, 0.5) if kind is lr_scheduler.CyclicLR else (0.5, 6)))


BAD_RATES = [
    (-1.0, ValueError, "the learning rate must be finite and not negative, got -1.0"),
    (float("nan"), ValueError, "the learning rate must be finite and not negative, got nan"),
    (torch.tensor(-1.0), ValueError, "the learning rate must be finite and not negative, got -1.0"),
    (1e39, ValueError, r"the learning rate must be finite and not negative, got 1e\+39"),
    ("0.1", TypeError, "the learning rate must be a number, got '0.1'"),
    (None, TypeError, "the learning rate must be a number, got None"),
    (torch.ones(2), TypeError, r"the learning rate must be a number, got tensor\("),
    (0.0, ValueError, "the learning rate must be above 0 for ftrl, got 0.0"),
    (1e-60, ValueError, "the learning rate must be above 0 for ftrl, got 1e-60"),
]


@pytest.mark.parametrize(("value", "error", "message"), BAD_RATES)
def test_one_rate_that_is_refused_leaves_the_rates_of_all_tables(
    value: Any, error: type[Exception], message: str, table_name: TableName
) -> None:
    modules = [collected(table_name(), optimizer={"kind": kind, "lr": 1.0}) for kind in ("sgd", "ftrl", "adam")]
    optimizer = SparseOptimizer(modules=modules)
    state = copy.deepcopy(optimizer.state_dict())
    message = f'^table "{re.escape(modules[1].name)}": {message}'

    state["param_groups"][0]["lr"], state["param_groups"][1]["lr"] = 0.5, value
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0] * 3

    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, value
    with pytest.raises(error, match=message):
        optimizer.step()
    for module in modules:
        statistics = table_statistics(module.name)
        assert (statistics["learning_rate"], statistics["step"], len(module._trace)) == (1.0, 0, 1)

    optimizer.param_groups[1]["lr"] = 0.25
    optimizer.step()
    assert [table_statistics(module.name)["learning_rate"] for module in modules] == [0.5, 0.25, 1.0]


def test_an_optimizer_that_a_table_refuses_leaves_the_rates_of_all(table_name: TableName) -> None:
    modules = [collected(table_name(), optimizer={"kind": kind, "lr": 1.0}) for kind in ("sgd", "ftrl")]
    with pytest.raises(ValueError, match="above 0 for ftrl"):
        SparseOptimizer(lr=0.0, modules=modules)
    assert [table_statistics(module.name)["learning_rate"] for module in modules] == [1.0, 1.0]


@pytest.mark.parametrize("when", ["at construction", "in the group"])
@pytest.mark.parametrize("at_construction", [True, False])
def test_a_scheduler_changes_a_rate_that_is_a_tensor(when: str, at_construction: bool, table_name: TableName) -> None:
    module = collected(table_name())
    lr = torch.tensor(0.5)
    optimizer = SparseOptimizer(
        lr=lr if when == "at construction" else None,  # type: ignore[arg-type]
        modules=[module] if at_construction else None,
    )
    if when == "in the group":
        optimizer.step([module])
        optimizer.param_groups[0]["lr"] = lr
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for expected in (0.5, 0.25, 0.125):
        module(IDS).sum().backward()
        optimizer.step([module])
        assert table_statistics(module.name)["learning_rate"] == expected
        scheduler.step()
