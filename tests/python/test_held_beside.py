"""What holds an embedding or its weight beside the place that `replace_embeddings` puts a table in."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from recstore_ops import DistEmbedding, replace_embeddings, table_names

pytestmark = [pytest.mark.tier("quick"), pytest.mark.usefixtures("tables_are_dropped")]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user: Any = nn.Embedding(6, 4)
        self.top: Any = nn.Linear(4, 1)
        self.held: Any = None

    def help(self) -> None:
        pass


@dataclass
class Holder:
    value: Any

    def look(self) -> None:
        pass


def unregistered(value: Any) -> nn.Module:
    module = nn.Module()
    module.value = value
    return module


def defaults(value: Any) -> Any:
    found = defaultdict(list)
    found["a"].append(value)
    return found


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value],
    "tuple": lambda value: ((value,),),
    "dict": lambda value: {"a": [{"b": value}]},
    "ordered dict": lambda value: OrderedDict(a=value),
    "default dict": defaults,
    "deque": lambda value: deque([value]),
    "partial, positional": lambda value: partial(print, value),
    "partial, keyword": lambda value: partial(dict, value=value),
    "partial within": lambda value: [partial(partial(setattr, value), "a")],
    "object": lambda value: SimpleNamespace(value=value),
    "dataclass": Holder,
    "list of an object": lambda value: [Holder([value])],
    "UserDict": lambda value: UserDict(a=value),
    "method of an object": lambda value: Holder(value).look,
    "module in a list": lambda value: [unregistered(value)],
}

OF_MODULES: dict[str, Callable[[Any], Any]] = {
    **HOLDERS,
    "set": lambda module: {module},
    "forward": lambda module: module.forward,
    "call": lambda module: module.__call__,
    "method": lambda module: MethodType(print, module),
    "partial of forward": lambda module: partial(module.forward, torch.tensor([1])),
}

OF_WEIGHTS: dict[str, Callable[[Any], Any]] = {
    **HOLDERS,
    "data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach(),
    "some rows": lambda weight: weight.detach()[2:],
    "a column": lambda weight: weight[:, 1],
    "transposed": lambda weight: [weight.t()],
    "function": lambda weight: partial(functional.embedding, weight=weight),
    "optimizer": lambda weight: torch.optim.SGD([weight], lr=0.1),
    "optimizers": lambda weight: Holder([torch.optim.SGD([weight], lr=0.1)]),
    "schedule": lambda weight: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight], lr=0.1), 1),
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_what_holds_the_module_is_refused(name: str, prefix: str) -> None:
    model, before = Model(), table_names()
    model.held = OF_MODULES[name](model.user)
    with pytest.raises(ValueError, match='"user": held holds the module too, and would keep it'):
        replace_embeddings(model, prefix=prefix)
    assert isinstance(model.user, nn.Embedding)
    assert table_names() == before


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_what_holds_the_weight_is_warned_of(name: str, prefix: str) -> None:
    model = Model()
    object.__setattr__(model, "held", OF_WEIGHTS[name](model.user.weight))
    with pytest.warns(UserWarning, match="held holds a weight that a table") as caught:
        replace_embeddings(model, prefix=prefix)
    assert len(caught) == 1
    assert isinstance(model.user, DistEmbedding)


@pytest.mark.embedded_only("servers drop no table for on_existing")
@pytest.mark.parametrize("choice", [None, "reset", "share"])
def test_a_warning_that_is_an_error_comes_before_anything_changes(choice: Any, prefix: str) -> None:
    old: Any = DistEmbedding(6, 4, f"{prefix}user") if choice else None
    rows: Any = old.weight[torch.arange(6)] if choice else None
    del old
    model, before = Model(), table_names()
    object.__setattr__(model, "held", model.user.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="held holds a weight that a table takes the place of"):
            replace_embeddings(model, prefix=prefix, on_existing=choice)
    assert isinstance(model.user, nn.Embedding)
    assert table_names() == before
    if choice:
        assert torch.equal(DistEmbedding(6, 4, f"{prefix}user", on_existing="share").weight[torch.arange(6)], rows)


class Slotted:
    __slots__ = ("value",)


class Odd:
    """What has attributes of every name."""

    __slots__ = ()

    def __getattr__(self, name: str) -> int:
        return 1


INNOCENT: dict[str, Callable[[Model], Any]] = {
    "a method of the model": lambda model: model.help,
    "the model": lambda model: [model],
    "a method of another module": lambda model: [model.top.forward],
    "modules that hold it": lambda model: [model, Holder(model)],
    "another weight": lambda model: partial(functional.linear, weight=model.top.weight),
    "a copy of the weight": lambda model: model.user.weight.detach().clone(),
    "another optimizer": lambda model: torch.optim.SGD(model.top.parameters(), lr=0.1),
    "a package": lambda model: torch,
    "a class": lambda model: Model,
    "a function": lambda model: functional.relu,
    "a meta tensor": lambda model: torch.empty(6, 4, device="meta"),
    "a sparse tensor": lambda model: torch.eye(3).to_sparse(),
    "no elements": lambda model: model.user.weight.detach()[:0],
    "no attributes": lambda model: [Slotted(), Odd(), object()],
}


@pytest.mark.parametrize("name", INNOCENT)
def test_what_holds_neither_is_left_alone(name: str, prefix: str) -> None:
    model = Model()
    object.__setattr__(model, "held", INNOCENT[name](model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        replace_embeddings(model, prefix=prefix)
    assert isinstance(model.user, DistEmbedding)


def test_objects_that_hold_one_another_are_looked_through_once(prefix: str) -> None:
    model, first, second = Model(), Holder(None), Holder([])
    first.value = [second, first]
    second.value.append(second.value)
    model.held = [first, second]
    replace_embeddings(model, prefix=prefix)
    assert isinstance(model.user, DistEmbedding)
