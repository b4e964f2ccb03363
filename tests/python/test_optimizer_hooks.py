"""Hooks of an optimizer's state: called as often and with the same arguments as those of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from recstore_ops import DistEmbedding, SparseOptimizer

pytestmark = pytest.mark.tier("quick")

METHODS = (
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)


@pytest.mark.parametrize("method", METHODS)
def test_hooks_of_states_are_called_as_torch_s(method: str, table_name: Callable[[], str]) -> None:
    ours = SparseOptimizer(modules=[DistEmbedding(5, 2, table_name())])
    theirs = torch.optim.SGD(nn.Linear(1, 1).parameters())
    calls: dict[str, list[list[str]]] = {"ours": [], "theirs": []}
    for name, optimizer in (("ours", ours), ("theirs", theirs)):

        def hook(*arguments: object, name: str = name) -> None:
            calls[name].append(
                ["optimizer" if isinstance(each, torch.optim.Optimizer) else "state" for each in arguments]
            )

        handle = getattr(optimizer, method)(hook)
        optimizer.load_state_dict(optimizer.state_dict())
        handle.remove()
        optimizer.load_state_dict(optimizer.state_dict())
    assert len(calls["ours"]) == 1
    assert calls["ours"] == calls["theirs"]
