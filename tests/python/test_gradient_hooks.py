"""Hooks of a table's parameter: called as those of an `nn.Embedding`, or an error that names the table."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_copies import SlowCopies
from torch import Tensor, nn

from recstore_ops import DistEmbedding, KeyedJaggedTensor, RecStoreEmbeddingBagCollection, SparseOptimizer
from recstore_ops.ops.collecting import hooked

pytestmark = pytest.mark.tier("test")

NUM, DIM = 6, 2
IDS = torch.tensor([1, 2])
ALL = torch.arange(NUM)

METHODS = ("register_hook", "register_post_accumulate_grad_hook")


def twins(name: str) -> tuple[nn.Embedding, DistEmbedding]:
    dense = nn.Embedding(NUM, DIM)
    nn.init.constant_(dense.weight, 1.0)
    return dense, of_ones(name)


def of_ones(name: str) -> DistEmbedding:
    ones: Any = {"kind": "constant", "value": 1.0}
    return DistEmbedding(NUM, DIM, name, optimizer={"kind": "sgd", "lr": 1.0}, initializer=ones)


def only(module: nn.Module) -> Any:
    return next(module.parameters())


def total(module: nn.Module) -> float:
    return total_of(only(module))


def total_of(parameter: Any) -> float:
    grad = parameter.grad
    return 0.0 if grad is None else float(grad.sum())


def stepped(module: Any) -> Tensor:
    """The rows behind a step."""
    if isinstance(module, nn.Embedding):
        torch.optim.SGD(module.parameters(), 1.0).step()
        return module.weight.detach()
    SparseOptimizer(modules=[module]).step()
    return module.weight[ALL]


def failing(module: nn.Module, ids: Tensor) -> None:
    """A pass that raises behind the node of its lookup."""

    def fail(grad: Tensor) -> None:
        raise KeyError("behind the lookup")

    factor = torch.ones(DIM, requires_grad=True) * 1.0
    factor.register_hook(fail)
    with pytest.raises(KeyError, match="behind the lookup"):
        (module(ids) * factor).sum().backward()


def test_a_pass_that_raises_drops_its_gradients_alone(table_name: Callable[[], str]) -> None:
    table = of_ones(table_name())
    only(table).register_hook(lambda grad: None)
    table(torch.tensor([1])).sum().backward()
    for _ in range(2):
        failing(table, torch.tensor([3]))
        assert total(table) == DIM
    table(torch.tensor([4])).sum().backward()
    assert total(table) == 2 * DIM
    assert stepped(table)[:, 0].tolist() == [1, 0, 1, 1, 0, 1]


def test_what_a_raising_hook_got_is_not_applied(table_name: Callable[[], str]) -> None:
    for module in twins(table_name()):
        module(torch.tensor([0])).sum().backward()

        def fail(grad: Any) -> None:
            raise KeyError("hook")

        handle = only(module).register_hook(fail)
        with pytest.raises(KeyError, match="hook"):
            module(IDS).sum().backward()
        handle.remove()
        assert total(module) == DIM
        assert stepped(module)[:, 0].tolist() == [0, 1, 1, 1, 1, 1]


def read(module: nn.Module) -> list[float]:
    seen = []
    only(module).register_hook(lambda grad: seen.append(total(module)))
    for _ in range(3):
        module(IDS).sum().backward()
    return seen


def dropped(module: nn.Module) -> None:
    module(IDS).sum().backward()
    only(module).register_hook(lambda grad: setattr(only(module), "grad", None))
    module(torch.tensor([4])).sum().backward()


def frozen(module: nn.Module) -> None:
    module(IDS).sum().backward()

    def freeze(grad: Any) -> None:
        only(module).requires_grad_(False)

    only(module).register_hook(freeze)
    module(torch.tensor([4])).sum().backward()
    only(module).requires_grad_(True)


def within(module: nn.Module) -> list[float]:
    """A pass between the lookups of another one."""
    seen: list[float] = []
    only(module).register_hook(lambda grad: seen.append(float(grad.sum())))
    other = module(torch.tensor([4])).sum() * module(IDS)

    def backward(grad: Tensor) -> None:
        with torch.enable_grad():
            (module(IDS).sum() * 3).backward()

    other.register_hook(backward)
    (module(IDS).sum() * 2 + other.sum()).backward()
    return seen


WITHIN: dict[str, Callable[[nn.Module], Any]] = {"read": read, "dropped": dropped, "frozen": frozen, "pass": within}


@pytest.mark.parametrize("idiom", WITHIN.values(), ids=WITHIN)
def test_hooks_see_and_change_what_those_of_torch_do(
    idiom: Callable[[nn.Module], Any], table_name: Callable[[], str]
) -> None:
    dense, table = twins(table_name())
    assert idiom(table) == idiom(dense)
    assert torch.equal(stepped(table), stepped(dense))


def test_passes_of_threads_have_gradients_of_their_own(table_name: Callable[[], str]) -> None:
    for module in twins(table_name()):
        seen: list[float] = []
        only(module).register_hook(lambda grad, seen=seen: seen.append(float(grad.sum())))

        def train(module: nn.Module = module) -> None:
            for _ in range(40):
                (module(IDS).sum() + module(IDS).sum()).backward()

        threads = [threading.Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [4.0 * DIM] * 160
        assert total(module) == 160 * 4.0 * DIM


def test_hooks_end_with_their_module(table_name: Callable[[], str]) -> None:
    def trained() -> tuple[int, weakref.ref[DistEmbedding]]:
        table = of_ones(table_name())
        optimizer = SparseOptimizer(modules=[table])
        only(table).register_post_accumulate_grad_hook(lambda p: optimizer.step())
        only(table).register_hook(lambda grad: grad / table.embedding_dim)
        table(IDS).sum().backward()
        failing(table, IDS)
        number = int(table.table.collector)
        assert number in hooked
        return number, weakref.ref(table)

    number, gone = trained()
    gc.collect()
    assert gone() is None
    assert number not in hooked


@pytest.mark.parametrize("method", METHODS)
def test_a_hook_that_would_get_a_part_of_a_gradient_is_refused(method: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    first, second = of_ones(name), of_ones(name)
    named = rf'"{method}" of .* over table "{re.escape(name)}" with hooks: another module, DistEmbedding'
    with pytest.raises(RuntimeError, match=named):
        getattr(only(first), method)(lambda given: None)
    second.requires_grad_(False)
    handle = getattr(only(first), method)(lambda given: None)
    first(IDS).sum().backward()
    # Another module may come behind the hook.
    second.requires_grad_(True)
    with pytest.raises(RuntimeError, match=rf'"backward" of .*"{re.escape(name)}" with hooks'):
        first(IDS).sum().backward()
    assert total(first) == 2 * DIM
    handle.remove()
    first(IDS).sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_parameter_takes_no_hook(method: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    sentences = ("cannot register a hook|require gradient", f'"{method}" of .*"{re.escape(name)}": it is frozen')
    for module, sentence in zip(twins(name), sentences, strict=True):
        module.requires_grad_(False)
        with pytest.raises(RuntimeError, match=sentence):
            getattr(only(module), method)(lambda given: None)


GIVEN: dict[str, Callable[[Any], Any]] = {
    "half": lambda grad: grad.half(),
    "bool": lambda grad: grad != 0,
    "flat": lambda grad: grad.view(-1),
    "number": lambda grad: 0,
    "shifted": lambda grad: grad + 1,
}


@pytest.mark.parametrize("hook", GIVEN.values(), ids=GIVEN)
def test_a_hook_gives_a_gradient(hook: Callable[[Any], Any], table_name: Callable[[], str]) -> None:
    name = table_name()
    table = of_ones(name)
    only(table).register_hook(hook)
    with pytest.raises(
        RuntimeError, match=re.escape(f'a hook on the parameter of DistEmbedding over table "{name}" must give')
    ):
        table(IDS).sum().backward()
    assert total(table) == 0.0
    assert torch.equal(stepped(table), torch.ones(NUM, DIM))


def test_a_gradient_within_a_pass_is_that_of_passes_before(table_name: Callable[[], str]) -> None:
    table = of_ones(table_name())
    only(table).register_hook(lambda grad: None)
    seen: list[float] = []
    dense = torch.ones(DIM, requires_grad=True)
    for _ in range(3):
        factor = dense * 1.0
        factor.register_hook(lambda grad: seen.append(total(table)))
        (table(IDS) * factor).sum().backward()
    assert seen == [0.0, 2.0 * DIM, 4.0 * DIM]
    assert total(table) == 6.0 * DIM


LOOKUPS: dict[str, Callable[[DistEmbedding], Tensor]] = {
    "plain": lambda table: table(IDS),
    "staged": lambda table: table(table.stage(IDS, SlowCopies())),
    "compiled": lambda table: torch.compile(table, backend="aot_eager")(IDS),
    "called by torch.func": lambda table: torch.func.functional_call(table, dict(table.named_parameters()), (IDS,)),
}


@pytest.mark.parametrize("second", LOOKUPS)
@pytest.mark.parametrize("first", LOOKUPS)
def test_a_hook_is_called_once_for_all_lookups_of_a_pass(
    first: str, second: str, table_name: Callable[[], str]
) -> None:
    torch._dynamo.reset()
    table = of_ones(table_name())
    seen: list[float] = []

    def halve(grad: Any) -> Any:
        seen.append(float(grad.sum()))
        return grad * 0.5

    only(table).register_hook(halve)
    for _ in range(2):
        (LOOKUPS[first](table).sum() + 3 * LOOKUPS[second](table).sum() + table(IDS).sum()).backward()
    assert seen == [10.0 * DIM] * 2
    assert total(table) == 10.0 * DIM


def test_each_table_of_a_module_calls_its_own_hooks(table_name: Callable[[], str]) -> None:
    name, options = table_name(), {"optimizer": {"kind": "sgd", "lr": 1.0}}
    configs: Any = [
        {"name": f"{name}/{each}", "num_embeddings": NUM, "embedding_dim": DIM, "feature_names": [each]}
        for each in ("a", "b")
    ]
    module = RecStoreEmbeddingBagCollection(configs, **options)  # type: ignore[arg-type]
    seen: list[tuple[int, float]] = []
    for number, parameter in enumerate(module.parameters()):
        parameter.register_hook(lambda grad, number=number: seen.append((number, float(grad.sum()))) or grad * 0)
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    module(features).sum().backward()
    assert sorted(seen) == [(0, 2.0 * DIM), (1, 1.0 * DIM)]
    assert [total_of(parameter) for parameter in module.parameters()] == [0.0, 0.0]


def test_a_step_within_a_pass_whose_hooks_wait_is_refused(table_name: Callable[[], str]) -> None:
    name = table_name()
    table = of_ones(name)
    optimizer = SparseOptimizer(modules=[table])
    only(table).register_hook(lambda grad: None)
    table(torch.tensor([0])).sum().backward()
    dense = torch.ones(DIM, requires_grad=True)
    factor = dense * 1.0
    dense.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(RuntimeError, match=rf'"{re.escape(name)}": its parameter has hooks.*behind backward'):
        (table(IDS) * factor).sum().backward()
    assert total(table) == DIM
