"""The optimizers of `torch.optim` by name."""

from __future__ import annotations

import pytest
import torch

from recstore_ops.training.run.dense_parameters import (
    check_dense_optimizer,
    dense_optimizer_names,
    make_dense_optimizer,
)

pytestmark = pytest.mark.tier("quick")


@pytest.mark.parametrize("name", dense_optimizer_names())
def test_every_name_gives_an_optimizer_that_steps(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make_dense_optimizer(name, [parameter], lr=0.1, options={})
    parameter.square().sum().backward()
    optimizer.step()
    assert type(optimizer).__name__.lower() == name
    assert bool((parameter < 1).all())


def test_names_are_those_of_torch_in_any_case() -> None:
    assert {"adam", "adamw", "sgd", "rmsprop", "adagrad"} <= set(dense_optimizer_names())
    assert isinstance(
        make_dense_optimizer("AdamW", [torch.nn.Parameter(torch.ones(1))], lr=1, options={}), torch.optim.AdamW
    )


def test_options_reach_the_optimizer() -> None:
    optimizer = make_dense_optimizer(
        "sgd", [torch.nn.Parameter(torch.ones(1))], lr=0.5, options={"momentum": 0.9, "nesterov": True}
    )
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.9, True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lion", {}, "dense_optimizer must be one of adadelta, .*, sgd, got 'lion'"),
        ("lbfgs", {}, "dense_optimizer must be one of"),
        ("sparseadam", {}, "dense_optimizer must be one of"),
        ("adam", {"momentum": 0.9}, "torch.optim.Adam takes no momentum; it takes betas, eps"),
        ("adam", {"betas": (2.0, 0.9)}, "[Ii]nvalid beta"),
        ("sgd", {"momentum": "much"}, "torch.optim.SGD"),
    ],
)
def test_nonsense_is_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_dense_optimizer(name, options)
