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
