"""Every public method of `nn.Module`, on each kind of module over a table: as on the module of torch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import Pair, each_kind, pair
from torch import nn

from recstore_ops import RecStoreEmbeddingCollection

__all__ = ["pair"]

pytestmark = pytest.mark.tier("test")

Try = Callable[[Pair], None]


def _trains(pair: Pair) -> None:
    """Checks that a step trains both alike."""
    pair.backward()
    pair.step()
    pair.assert_equal_rows()
    assert pair.rows().any()


def _hands_back(method: str, *arguments: Any) -> Try:
    """Calls a method that returns the module, which trains afterwards."""

    def run(pair: Pair) -> None:
        for module in (pair.module, pair.rival):
            assert getattr(module, method)(*arguments) is module
        _trains(pair)

    return run


def _has_same(method: str, *arguments: Any, **options: Any) -> Try:
    """Compares the number of things that a method finds."""

    def run(pair: Pair) -> None:
        ours, theirs = (list(getattr(each, method)(*arguments, **options)) for each in (pair.module, pair.rival))
        assert len(ours) >= len(theirs)

    return run


def _converts(method: str, dtype: torch.dtype, *arguments: Any) -> Try:
    def run(pair: Pair) -> None:
        for module in (pair.module, pair.rival):
            assert getattr(module, method)(*arguments) is module
        ours, theirs = pair.outputs()
        assert ours.dtype == theirs.dtype == dtype
        assert pair.rows().dtype == torch.float32

    return run


def _calls_hooks(method: str, **options: Any) -> Try:
    """Compares how often hooks of both are called in a step, and that a removed one is called no more."""

    def run(pair: Pair) -> None:
        calls: dict[str, int] = {"ours": 0, "theirs": 0}

        def counting(name: str) -> Callable[..., None]:
            def hook(*arguments: Any) -> None:
                calls[name] += 1

            return hook

        handles = [
            getattr(module, method)(counting(name), **options)
            for name, module in (("ours", pair.module), ("theirs", pair.rival))
        ]
        _trains(pair)
        assert calls["ours"] == calls["theirs"] == 1
        for handle in handles:
            handle.remove()
        pair.outputs()
        assert calls["ours"] == calls["theirs"] == 1

    return run


def _calls_state_hooks(method: str) -> Try:
    def run(pair: Pair) -> None:
        calls: list[nn.Module] = []

        def hook(module: nn.Module, *arguments: Any) -> None:
            calls.append(module)

        for module in (pair.module, pair.rival):
            # The hook after loading gets the module too.
            getattr(module, method)(hook)
            module.load_state_dict(module.state_dict())
        assert sum(isinstance(each, type(pair.module)) for each in calls) == 1
        assert sum(each is pair.rival for each in calls) == 1

    return run


def _apply(pair: Pair) -> None:
    seen: list[nn.Module] = []
    assert pair.module.apply(seen.append) is pair.module
    assert seen[-1] is pair.module


def _buffer(pair: Pair) -> None:
    for module in (pair.module, pair.rival):
        module.register_buffer("_counts", torch.ones(2))
        assert module.get_buffer("_counts").tolist() == [1.0, 1.0]
        assert "_counts" in dict(module.named_buffers())
        assert len(list(module.buffers())) == 1
        assert "_counts" in module.state_dict()


def _compile(pair: Pair) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for module in (pair.module, pair.rival):
            module.compile(backend="aot_eager")
        _trains(pair)


def _parameters(pair: Pair) -> None:
    [(_, parameter)] = pair.module.named_parameters()
    [same] = pair.module.parameters()
    assert same is parameter


def _get_parameter(pair: Pair) -> None:
    [(name, _)] = pair.module.named_parameters()
    with pytest.raises(AttributeError, match=r"`weight` is not an nn\.Parameter"):
        pair.module.get_parameter(name)


def _get_submodule(pair: Pair) -> None:
    assert pair.model.get_submodule("0") is pair.module
    assert pair.module.get_submodule("") is pair.module


def _set_submodule(pair: Pair) -> None:
    pair.model.set_submodule("0", pair.module)
    _trains(pair)


def _extra_state(pair: Pair) -> None:
    _trains(pair)
    before = pair.rows()
    state = dict(pair.module.state_dict())
    pair.backward()
    pair.step()
    assert not torch.equal(pair.rows(), before)
    pair.module.load_state_dict(state)
    assert torch.equal(pair.rows(), before)


def _share_memory(pair: Pair) -> None:
    assert pair.module.share_memory() is pair.module
    _trains(pair)


def _train(pair: Pair) -> None:
    for module in (pair.module, pair.rival):
        assert module.eval() is module
        assert not module.training
        assert module.train() is module
        assert module.training
    _trains(pair)


def _to(pair: Pair) -> None:
    for module in (pair.module, pair.rival):
        assert module.to("cpu", non_blocking=True) is module
        assert module.to(torch.ones((), dtype=torch.float32)) is module
    _trains(pair)


def _to_empty(pair: Pair) -> None:
    before = pair.rows()
    for module in (pair.module, pair.rival):
        assert module.to_empty(device="cpu") is module
    assert torch.equal(pair.rows(), before), "rows stay"


def _zero_grad(pair: Pair) -> None:
    pair.backward()
    for module in (pair.module, pair.rival):
        module.zero_grad()
    pair.step()
    pair.assert_equal_rows()
    assert not pair.rows().any()


def _calls_backward_hooks(method: str) -> Try:
    def run(pair: Pair) -> None:
        calls: list[str] = []
        for name, module in (("ours", pair.module), ("theirs", pair.rival)):
            getattr(module, method)(lambda *arguments, name=name: calls.append(name))
        pair.backward()
        # torch calls these for tensors, and warns if a module gives jagged ones.
        expected = 0 if isinstance(pair.module, RecStoreEmbeddingCollection) else 1
        assert (calls.count("ours"), calls.count("theirs")) == (expected, 1)

    return run


def _register_module(pair: Pair) -> None:
    for method in ("register_module", "add_module"):
        getattr(pair.module, method)(f"_{method}", nn.Linear(1, 1))
        assert pair.module.get_submodule(f"_{method}").weight.shape == (1, 1)


def _register_parameter(pair: Pair) -> None:
    for module in (pair.module, pair.rival):
        module.register_parameter("_scale", nn.Parameter(torch.ones(())))
        assert "_scale" in dict(module.named_parameters())
    _trains(pair)


METHODS: dict[str, Try] = {
    **{name: _hands_back(name) for name in ("cpu", "float", "requires_grad_")},
    **{name: _has_same(name) for name in ("buffers", "children", "modules", "named_children", "named_modules")},
    **{name: _calls_hooks(name) for name in ("register_forward_hook", "register_forward_pre_hook")},
    **{
        name: _calls_state_hooks(name)
        for name in (
            "register_load_state_dict_post_hook",
            "register_load_state_dict_pre_hook",
            "register_state_dict_post_hook",
            "register_state_dict_pre_hook",
        )
    },
    "add_module": _register_module,
    "apply": _apply,
    "bfloat16": _converts("bfloat16", torch.bfloat16),
    "compile": _compile,
    "eval": _train,
    "train": _train,
    "double": _converts("double", torch.float64),
    "get_buffer": _buffer,
    "get_extra_state": _extra_state,
    "get_parameter": _get_parameter,
    "get_submodule": _get_submodule,
    "half": _converts("half", torch.float16),
    "load_state_dict": _extra_state,
    "named_buffers": _buffer,
    "named_parameters": _parameters,
    "parameters": _parameters,
    "register_buffer": _buffer,
    "register_full_backward_hook": _calls_backward_hooks("register_full_backward_hook"),
    "register_full_backward_pre_hook": _calls_backward_hooks("register_full_backward_pre_hook"),
    "register_module": _register_module,
    "register_parameter": _register_parameter,
    "set_extra_state": _extra_state,
    "set_submodule": _set_submodule,
    "share_memory": _share_memory,
    "state_dict": _extra_state,
    "to": _to,
    "to_empty": _to_empty,
    "type": _converts("type", torch.float64, torch.float64),
    "zero_grad": _zero_grad,
}


OF_OTHER_DEVICES = {"cuda", "ipu", "mtia", "xpu"}
OTHERS = {
    "T_destination": "a type",
    "call_super_init": "how torch builds modules",
    "dump_patches": "a flag of older versions",
    "extra_repr": "by every module's tests",
    "forward": "by all tests",
    "register_backward_hook": "deprecated in torch",
}
"""Public names of `nn.Module` that are not tried here, and why."""


def test_every_public_name_is_tried_or_explained() -> None:
    public = {name for name in dir(nn.Module) if not name.startswith("_")}
    assert public == METHODS.keys() | OTHERS.keys() | OF_OTHER_DEVICES


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:For backward hooks to be called")
@each_kind
@pytest.mark.parametrize("method", METHODS)
def test_methods_of_modules(method: str, pair: Pair) -> None:
    METHODS[method](pair)
