"""What loops over parameters, gradients and states do: as with `nn.Embedding` to the same numbers, or an error."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recstore_ops import (
    DistEmbedding,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
)

pytestmark = pytest.mark.tier("test")

NUM, DIM = 6, 2
IDS = torch.tensor([1, 2])
ALL = torch.arange(NUM)

Idiom = Callable[[nn.Module], Any]


def twins(name: str) -> tuple[nn.Embedding, DistEmbedding]:
    dense = nn.Embedding(NUM, DIM)
    nn.init.constant_(dense.weight, 1.0)
    ones: Any = {"kind": "constant", "value": 1.0}
    table = DistEmbedding(NUM, DIM, name, optimizer={"kind": "sgd", "lr": 1.0}, initializer=ones)
    table.weight[ALL] = torch.ones(NUM, DIM)
    return dense, table


def rows_of(module: Any) -> Tensor:
    return module.weight.detach().clone() if isinstance(module, nn.Embedding) else module.weight[ALL]


def optimizer_of(module: Any) -> Any:
    if isinstance(module, nn.Embedding):
        return torch.optim.SGD(module.parameters(), 1.0)
    return SparseOptimizer(modules=[module])


def trained(module: Any, between: Callable[[Any], Any] = lambda p: None, **options: Any) -> None:
    optimizer = optimizer_of(module)
    (module(IDS) * 4).sum().backward(**options)
    [parameter] = module.parameters()
    between(parameter)
    optimizer.step()


def only(module: nn.Module) -> Any:
    return next(module.parameters())


def moved(module: Any) -> Any:
    """A copy of a module, whose rows are others."""
    average = copy.deepcopy(module)
    with torch.no_grad():
        module.weight[ALL] = rows_of(module) + 1.0
    return average


def clamped_by_a_hook(module: nn.Module) -> None:
    only(module).register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    trained(module)


def halved_after_accumulation(module: nn.Module) -> None:
    def halve(p: Any) -> None:
        p.grad.mul_(0.5)

    only(module).register_post_accumulate_grad_hook(halve)
    trained(module)


def counted_by_a_hook_of_several(module: nn.Module) -> None:
    calls: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(list(module.parameters()), calls.append)
    trained(module)
    handle.remove()
    assert len(calls) == 1
    assert float(calls[0][0].norm()) == 8.0


def frozen_without_recursion(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = False
    assert not any(parameter.requires_grad for parameter in module.parameters())


def restored_by_data(module: nn.Module) -> None:
    best = [parameter.data.clone() for parameter in module.parameters()]
    trained(module)
    for parameter, rows in zip(module.parameters(), best, strict=True):
        parameter.data = rows


def restored_by_copy(module: nn.Module) -> None:
    with torch.no_grad():
        best = [copy.deepcopy(parameter.data) for parameter in module.parameters()]
        trained_once = torch.enable_grad()(trained)
        trained_once(module)
        for parameter, rows in zip(module.parameters(), best, strict=True):
            parameter.copy_(rows)


def average_by_copy(module: Any) -> Any:
    average = moved(module)
    with torch.no_grad():
        only(average).copy_(only(module).lerp(only(average), 0.5))
    return average


def average_by_data(module: Any) -> Any:
    average = moved(module)
    only(average).data = only(average).data * 0.75 + only(module).data * (1.0 - 0.75)
    return average


def average_of_a_clone(module: Any) -> Any:
    average = moved(module)
    only(average).data = only(module).data.clone()
    return average


def average_by_operators(module: Any) -> Any:
    average = moved(module)
    k, q = only(average), only(module)
    with torch.no_grad():
        q.copy_(k * 0.5 + q * (1 - 0.5))


def without(function: Callable[[Any], Any]) -> Idiom:
    """A function of a parameter, without gradients."""

    def idiom(module: nn.Module) -> None:
        with torch.no_grad():
            function(only(module))

    return idiom


def between(function: Callable[[Any], Any]) -> Idiom:
    return lambda module: trained(module, function)


def of_weight(function: Callable[[Any], Any]) -> Idiom:
    """A write to a view of a module's weight."""

    def idiom(module: Any) -> None:
        with torch.no_grad():
            function(module.weight)

    return idiom


def set_(target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)


def backed_up_by_clones(module: Any) -> None:
    shadow, backup = only(module).data.clone(), only(module).data.clone()
    trained(module)
    only(module).data = shadow
    trained(module)
    only(module).data = backup


def mean_of_two(module: Any) -> Any:
    other = moved(module)
    p, q = only(module), only(other)
    mean = (p.data + q.data) / 2
    kept = mean.clone()
    p.data.copy_(kept)
    q.data.copy_(kept)
    return other


def sum_of_snapshots(module: Any) -> None:
    snapshots = []
    for _ in range(2):
        module.zero_grad()
        trained(module)
        snapshots.append(only(module).data.clone())
    only(module).data.copy_(sum(snapshots) / 2)


def called_with_another(module: Any) -> Any:
    other = moved(module)
    parameters = {name: each.detach().clone() for name, each in other.named_parameters()}
    assert torch.equal(torch.func.functional_call(module, parameters, (IDS,)), rows_of(other)[IDS])
    optimizer = optimizer_of(other)
    (torch.func.functional_call(module, dict(other.named_parameters()), (IDS,)) * 4).sum().backward()
    optimizer.step()
    return other


AGREE: dict[str, Idiom] = {
    "swapped for a validation": backed_up_by_clones,
    "mean of two": mean_of_two,
    "sum of snapshots": sum_of_snapshots,
    "functional_call": called_with_another,
    "register_hook": clamped_by_a_hook,
    "register_post_accumulate_grad_hook": halved_after_accumulation,
    "register_multi_grad_hook": counted_by_a_hook_of_several,
    "backward(inputs)": lambda module: trained(module, inputs=list(module.parameters())),
    "parameters(recurse=False)": frozen_without_recursion,
    "p.data = best": restored_by_data,
    "p.copy_(best)": restored_by_copy,
    "copy_(lerp)": average_by_copy,
    "data = sum": average_by_data,
    "data = clone": average_of_a_clone,
    "copy_(sum)": average_by_operators,
    "grad.data =": between(lambda p: set_(p.grad, "data", p.grad.data * 0.5)),
    "mul(out)": between(lambda p: torch.mul(p.grad, 0.5, out=p.grad)),
    "nan_to_num(out)": between(lambda p: torch.nan_to_num(p.grad, out=p.grad)),
    "grad = None": between(lambda p: set_(p, "grad", None)),
    "del grad": between(lambda p: delattr(p, "grad")),
    "grad *=": between(lambda p: set_(p, "grad", p.grad * 0.5)),
    "weight[0].fill_": of_weight(lambda weight: weight[0].fill_(0)),
    "weight[0:2].zero_": of_weight(lambda weight: weight[0:2].zero_()),
    "weight[:].mul_": of_weight(lambda weight: weight[:].mul_(0)),
}


@pytest.mark.parametrize("idiom", AGREE.values(), ids=AGREE)
def test_rows_are_those_of_torch_s_module(idiom: Idiom, table_name: Callable[[], str]) -> None:
    dense, table = twins(table_name())
    expected = rows_of(idiom(dense) or dense)
    torch.testing.assert_close(rows_of(idiom(table) or table), expected, rtol=0, atol=0)


def changed_in_a_state(module: nn.Module) -> None:
    module.state_dict()["rows"][3] = torch.zeros(DIM)


def averaged_in_a_state(module: nn.Module) -> None:
    for value in module.state_dict().values():
        if value.is_floating_point():
            value.copy_(value * 0.5)


def swapped(module: Any) -> None:
    other = copy.deepcopy(module)
    only(module).data, only(other).data = only(other).data, only(module).data


def restored_late(module: Any) -> None:
    backup = only(module).data
    only(module).data = only(module).data.clone()
    only(module).data = backup


def changed_between(module: Any) -> None:
    other = copy.deepcopy(module)
    mean = (only(module).data + only(other).data) / 2
    module.weight[ALL] = rows_of(module)
    only(other).data.copy_(mean)


def gradient_of_before(module: Any) -> None:
    module(IDS).sum().backward()
    saved = only(module).grad
    only(module).grad = None
    module(IDS).sum().backward()
    only(module).grad = saved


def kept_without_its_module(module: Any) -> None:
    copied = only(copy.deepcopy(module))
    copied.data.copy_(copied.data)


def matrix_in_a_call(module: Any) -> None:
    torch.func.functional_call(module, {"weight": torch.ones(NUM, DIM)}, (IDS,))


FILLED = [*("clamp_", "clip_", "sign_", "abs_", "round_", "zero_", "neg_", "exp_", "sqrt_", "relu_", "tanh_", "floor_")]
REFUSED: dict[str, tuple[str, Idiom]] = {
    **{
        name: (name, without(lambda p, name=name: getattr(p.data, name)(*((-1, 1) if name in FILLED[:2] else ()))))
        for name in FILLED
    },
    "masked_fill_": ("masked_fill_", without(lambda p: p.data.masked_fill_(torch.tensor(True), 0.0))),
    "data = clamp": ("clamp", without(lambda p: set_(p, "data", p.data.clamp(-1, 1)))),
    "data[:] =": ("__setitem__", without(lambda p: p.data.__setitem__(slice(None), 0.0))),
    "lerp(out)": ("lerp", without(lambda p: torch.lerp(p, p, 0.5, out=p))),
    "add_(1)": ("add_", without(lambda p: p.add_(1.0))),
    "-= grad": ("sub", between(lambda p: without(lambda p: p.sub_(0.1 * p.grad))(nn.ParameterList([p])))),
    "data of two": ("data", swapped),
    "data of before": ("data", restored_late),
    "sum of before": ("copy", changed_between),
    "grad of before": ("grad", gradient_of_before),
    "functional_call": ("weight", matrix_in_a_call),
    "state[rows]": ("__setitem__", changed_in_a_state),
    "state.copy_": ("copy_", averaged_in_a_state),
    "norm in a loss": ("square", lambda module: only(module).square().sum()),
    "parameters_to_vector": ("view", lambda module: nn.utils.parameters_to_vector(module.parameters())),
    "for row in p": ("__iter__", without(list)),
    "for row in p.data": ("__iter__", lambda module: list(only(module).data)),
    "for row in p.grad": ("__iter__", between(lambda p: list(p.grad))),
    "for row in |p.grad|": ("unbind", between(lambda p: list(p.grad.abs()))),
    "cat": ("cat", between(lambda p: torch.cat([torch.ones(2), p.grad.view(-1)]))),
    "stack": ("stack", between(lambda p: torch.stack([p.grad.clone()]))),
    "gradients to a vector": ("cat", between(lambda p: nn.utils.parameters_to_vector([p.grad]))),
    "einsum": ("einsum", between(lambda p: torch.einsum("ij,ij", [p.grad, p.grad]))),
    "grad == matrix": ("__eq__", between(lambda p: p.grad.abs() == torch.zeros(DIM))),
    **{
        f"{name}(dim)": (name, between(lambda p, name=name: getattr(p.grad, name)(dim=1)))
        for name in ("sum", "mean", "max", "min", "amax", "amin", "any", "all", "count_nonzero", "norm")
    },
    "sum(0)": ("sum", between(lambda p: p.grad.sum(0))),
    "mean(1)": ("mean", between(lambda p: p.grad.mean(1))),
    "max(tensor)": ("max", between(lambda p: torch.max(p.grad, torch.zeros(())))),
    "mean of bool": ("mean", between(lambda p: (p.grad > 0).mean())),
    "linalg.norm(-1)": ("linalg_norm", between(lambda p: torch.linalg.norm(p.grad, -1))),
    "linalg.norm(dim)": ("linalg_norm", between(lambda p: torch.linalg.norm(p.grad, 2, dim=1))),
    "foreach of several": ("add", between(lambda p: torch._foreach_add([p.grad], [p.grad]))),  # type: ignore[attr-defined]
    "zeros_like": ("zeros_like", lambda module: [torch.zeros_like(p) for p in module.parameters()]),
}


@pytest.mark.parametrize(("function", "idiom"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_table_and_function_and_changes_nothing(
    function: str, idiom: Idiom, table_name: Callable[[], str]
) -> None:
    name = table_name()
    _, table = twins(name)
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        idiom(table)
    assert re.search(rf'"{function}_?"', str(caught.value))
    assert name in str(caught.value)
    assert torch.equal(rows_of(table), torch.ones(NUM, DIM))
    assert table.table.statistics()["step"] == 0


BACKWARD: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "grad_tensors": lambda module: {"grad_tensors": torch.tensor(0.5)},
    "grad_variables": lambda module: {"grad_variables": torch.tensor(0.5)},
    "retain_graph": lambda module: {"retain_graph": True},
    "create_graph": lambda module: {"create_graph": True},
    "inputs": lambda module: {"inputs": list(module.parameters())},
    "inputs by name": lambda module: {"inputs": dict(module.named_parameters())},
    "one input": lambda module: {"inputs": only(module)},
}


@pytest.mark.parametrize("options", BACKWARD.values(), ids=BACKWARD)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph", "ignore:`grad_variables` is deprecated")
def test_backward_takes_each_argument_as_over_a_matrix(
    options: Callable[[nn.Module], dict[str, Any]], table_name: Callable[[], str]
) -> None:
    dense, table = twins(table_name())
    for module in (dense, table):
        optimizer = optimizer_of(module)
        torch.autograd.backward((module(IDS) * 4).sum(), **options(module))
        optimizer.step()
    assert torch.equal(rows_of(table), rows_of(dense))
    known = set(inspect.signature(torch.autograd.backward).parameters)
    assert known == {"tensors", *(name for name in BACKWARD if name.isidentifier())}


GRAD: dict[str, dict[str, Any]] = {
    "grad_outputs": {"grad_outputs": torch.tensor(0.5)},
    "retain_graph": {"retain_graph": True},
    "create_graph": {"create_graph": True},
    "only_inputs": {"only_inputs": True},
    "allow_unused": {"allow_unused": True},
    "is_grads_batched": {"is_grads_batched": True, "grad_outputs": torch.ones(2)},
    "materialize_grads": {"materialize_grads": True},
}


@pytest.mark.parametrize("options", GRAD.values(), ids=GRAD)
def test_grad_of_other_tensors_collects_nothing_and_of_a_table_is_refused(
    options: dict[str, Any], table_name: Callable[[], str]
) -> None:
    name = table_name()
    grad: Any = torch.autograd.grad
    dense, module = twins(name)
    weight = torch.ones(2, requires_grad=True)
    expected, loss = ((each(IDS) * weight).sum() for each in (dense, module))
    [of_dense], [of_table] = (grad(each, [weight], **{"retain_graph": True, **options}) for each in (expected, loss))
    assert torch.equal(of_table, of_dense)
    assert not module.table.has_collected()
    own = list(module.parameters())
    for inputs in (own, own[0], [weight, *own], dict(module.named_parameters())):
        with pytest.raises((AttributeError, RuntimeError), match=re.escape(f'"{name}"')):
            grad(loss, inputs, **options)
    assert not module.table.has_collected()
    assert set(inspect.signature(torch.autograd.grad).parameters) == {"outputs", "inputs", *GRAD}


def test_a_module_without_its_parameter_says_so_and_keeps_its_rows(table_name: Callable[[], str]) -> None:
    name = table_name()
    _, table = twins(name)
    with pytest.raises(TypeError, match=re.escape(name)):
        nn.utils.weight_norm(table)
    with pytest.raises(RuntimeError, match=re.escape(f'over table "{name}": None is in its place')):
        table(IDS)
    assert torch.equal(table.state_dict()["rows"], torch.ones(NUM, DIM))


def test_a_fused_collection_has_one_input_for_all_its_tables(table_name: Callable[[], str]) -> None:
    configs = [
        EmbeddingBagConfig(name=table_name(), num_embeddings=NUM, embedding_dim=DIM, feature_names=[feature])
        for feature in "ab"
    ]
    bags = RecStoreEmbeddingBagCollection(configs)
    features = KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.ones(2, dtype=torch.int64))
    first, second = bags.parameters()
    for inputs, collects in (([second], False), ([first], True), ([first, second], True)):
        bags.zero_grad()
        bags(features).sum().backward(inputs=inputs)
        assert [each.grad is not None for each in (first, second)] == [collects, collects]


NORMS: dict[str, Callable[[Any], Tensor]] = {
    "norm": lambda grad: grad.norm(),
    "torch.norm": torch.norm,
    "view": lambda grad: grad.view(-1).norm(),
    "flatten": lambda grad: grad.detach().flatten().norm(2),
    "clone": lambda grad: grad.clone().norm(),
    "double": lambda grad: grad.double().norm().float(),
    "vector_norm": torch.linalg.vector_norm,
    "squares": lambda grad: (grad**2).sum().sqrt(),
    "abs max": lambda grad: grad.abs().max() * 2,
    "mean": lambda grad: grad.mean() * NUM * DIM / 2,
    "above": lambda grad: (grad > 1).sum() * 2.0,
    "shifted": lambda grad: (grad + 1).sum() - NUM * DIM - 8,
    "foreach": lambda grad: torch._foreach_norm([grad])[0],  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_gradient_is_measured_as_that_of_a_matrix(
    norm: Callable[[Any], Tensor], table_name: Callable[[], str]
) -> None:
    for module in twins(table_name()):
        (module(IDS) * 4).sum().backward()
        assert float(norm(only(module).grad)) == 8.0


ORDERS: dict[str, Callable[[Any], Tensor]] = {
    **{f"linalg.norm({order})": lambda grad, o=order: torch.linalg.norm(grad, o) for order in (1, 2, torch.inf)},
    "linalg.norm(None)": torch.linalg.norm,
    "linalg.norm(fro)": lambda grad: torch.linalg.norm(grad, "fro"),
    "linalg.norm(nuc)": lambda grad: torch.linalg.norm(grad, ord="nuc"),
    "linalg.norm of a vector": lambda grad: torch.linalg.norm(grad.view(-1), 1),
    **{f"vector_norm({o})": lambda grad, o=o: torch.linalg.vector_norm(grad, o) for o in (1, 2, torch.inf)},
    **{f"norm({order})": lambda grad, order=order: grad.norm(order) for order in (1, 2, 3, torch.inf)},
    "torch.norm": lambda grad: torch.norm(grad, p=1, dtype=torch.float64),
    "sum(dtype)": lambda grad: grad.sum(dtype=torch.float64),
    "mean(dtype)": lambda grad: grad.mean(dtype=torch.float64),
    **{
        f"_foreach_{name}": lambda grad, name=name: getattr(torch, f"_foreach_{name}")([torch.ones(1), grad])[1].sum()
        for name in ("abs", "neg", "sqrt", "sign", "exp")
    },
    **{
        f"_foreach_{name}(2)": lambda grad, name=name: getattr(torch, f"_foreach_{name}")([grad], 2.0)[0].sum()
        for name in ("mul", "div", "add", "sub", "pow", "clamp_min")
    },
    "_foreach_mul([2])": lambda grad: torch._foreach_mul([torch.ones(1), grad], [1.0, 2.0])[1].sum(),  # type: ignore[attr-defined]
    "_foreach_max": lambda grad: torch._foreach_max([torch.ones(1), grad])[1],  # type: ignore[attr-defined]
    "_foreach_norm(1)": lambda grad: torch._foreach_norm([grad.abs()], 1)[0],  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_number_of_a_gradient_is_that_of_its_matrix(
    order: Callable[[Any], Tensor], table_name: Callable[[], str]
) -> None:
    found = []
    for module in twins(table_name()):
        (module(IDS) * torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum().backward()
        found.append(order(only(module).grad))
    assert type(found[1]) is Tensor
    torch.testing.assert_close(found[1], found[0])


def test_an_optimizer_of_torch_alone_warns_and_then_raises(table_name: Callable[[], str]) -> None:
    name = table_name()
    _, table = twins(name)
    adam = torch.optim.Adam(table.parameters())
    for number in range(2):
        table(IDS).sum().backward()
        if number == 0:
            with pytest.warns(
                UserWarning, match=rf'"{re.escape(name)}", which it cannot step.*SparseOptimizer\('
            ) as said:
                adam.step()
            assert said[0].filename == __file__
        else:
            with pytest.raises(RuntimeError, match="SparseOptimizer"):
                adam.step()
    sparse = SparseOptimizer()
    sparse.step([table])
    table(IDS).sum().backward()
    adam.step()
    assert rows_of(table)[1].tolist() == [-1.0, -1.0]
