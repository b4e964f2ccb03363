"""Functions of torch in compiled code, over what stands for a table: as over a matrix, or an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding
from recstore_ops.nn.gradient_values import GradientValues
from recstore_ops.nn.table_parameter import StandInGradient
from recstore_ops.nn.table_rows import RowsOfTable

pytestmark = pytest.mark.tier("all")

NUM, DIM = 5, 3
ROWS = torch.linspace(-1, 2, NUM * DIM).view(NUM, DIM)
IDS = torch.tensor([1, 2, 2])

PLAIN = [
    "abs",
    "all",
    "amax",
    "any",
    "ceil",
    "clone",
    "cos",
    "detach",
    "diff",
    "exp",
    "flatten",
    "float",
    "half",
    "isfinite",
    "isnan",
    "max",
    "mean",
    "min",
    "nan_to_num",
    "neg",
    "relu",
    "round",
    "sigmoid",
    "sign",
    "square",
    "squeeze",
    "std",
    "sub",
    "sum",
    "t",
    "tanh",
    "tril",
    "triu",
    "unbind",
    "var",
    "zero_",
]
"""Functions of the tensor alone."""

OWN: dict[str, Callable[[Any], Any]] = {
    "add": lambda each: each + 1.0,
    "cat": lambda each: torch.cat([each, each]),
    "chunk": lambda each: each.chunk(2),
    "clamp": lambda each: each.clamp(-0.1, 0.1),
    "cumsum": lambda each: each.cumsum(0),
    "div": lambda each: each / 2,
    "dot_self": lambda each: each.flatten() @ each.flatten(),
    "equal": lambda each: torch.equal(each, each + 0),
    "expand": lambda each: each.expand(2, NUM, DIM),
    "flip": lambda each: each.flip(0),
    "full_like": lambda each: torch.full_like(each, 2.0),
    "gather": lambda each: each.gather(0, torch.zeros(1, DIM, dtype=torch.int64)),
    "index_select": lambda each: each.index_select(0, IDS),
    "lerp": lambda each: torch.lerp(each, each + 1, 0.5),
    "linear": lambda each: torch.nn.functional.linear(torch.ones(1, DIM), each),
    "log_softmax": lambda each: each.log_softmax(1),
    "masked_fill": lambda each: each.masked_fill(each > 0, 0.0),
    "matmul": lambda each: each @ torch.ones(DIM, 1),
    "mul": lambda each: 2 * each,
    "narrow": lambda each: each.narrow(0, 1, 2),
    "numel": lambda each: torch.ones(1) * each.numel(),
    "permute": lambda each: each.permute(1, 0),
    "pow": lambda each: each**2,
    "rand_like": lambda each: torch.rand_like(each) * 0,
    "ones_like": torch.ones_like,
    "zeros_like": torch.zeros_like,
    "repeat": lambda each: each.repeat(2, 1),
    "reshape": lambda each: each.reshape(-1),
    "rsub": lambda each: 1 - each,
    "select": lambda each: each.select(0, 1),
    "shape": lambda each: torch.zeros(each.shape),
    "slice": lambda each: each[1:3],
    "softmax": lambda each: each.softmax(0),
    "split": lambda each: each.split(2),
    "sqrt": lambda each: each.abs().sqrt(),
    "stack": lambda each: torch.stack([each, each]),
    "svdvals": lambda each: torch.linalg.svdvals(each),
    "to_double": lambda each: each.to(torch.float64),
    "topk": lambda each: each.topk(2, 0).values,
    "transpose": lambda each: each.transpose(0, 1),
    "type_as": lambda each: each.type_as(torch.ones(1, dtype=torch.float64)),
    "unsqueeze": lambda each: each.unsqueeze(0),
    "view": lambda each: each.view(DIM, NUM),
    "where": lambda each: torch.where(each > 0, each, 0.0),
    "add_": lambda each: each.add_(1.0),
    "clamp_": lambda each: each.clamp_(-0.1, 0.1),
    "copy_": lambda each: each.copy_(torch.ones(NUM, DIM)),
    "fill_": lambda each: each.fill_(1.0),
    "mul_": lambda each: each.mul_(0.5),
    "getitem": lambda each: each[IDS],
    "requires_grad": lambda each: torch.ones(1) * each.requires_grad,
    "is_leaf": lambda each: torch.ones(1) * each.is_leaf,
    "dim": lambda each: torch.ones(1) * each.dim(),
    "size": lambda each: torch.ones(1) * each.size(1),
    "len": lambda each: torch.ones(1) * len(each),
    "dtype": lambda each: torch.ones(1, dtype=each.dtype),
    "device": lambda each: torch.ones(1, device=each.device),
    "is_floating_point": lambda each: torch.ones(1) * each.is_floating_point(),
    "grad": lambda each: torch.ones(1) if each.grad is None else each.grad.norm(),
    "data": lambda each: each.data.sum(),
    "argmax": lambda each: each.argmax(),
    "sort": lambda each: each.sort(0).values,
}


FUNCTIONS = {**{name: lambda each, name=name: getattr(each, name)() for name in PLAIN}, **OWN}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(name: str) -> tuple[DistEmbedding, nn.Embedding]:
    """Both modules with one gradient collected."""
    ours = DistEmbedding(NUM, DIM, name, init_func=lambda *_: ROWS, optimizer={"kind": "sgd", "lr": 1.0})
    theirs = nn.Embedding(NUM, DIM, _weight=ROWS.clone())
    for module in (ours, theirs):
        (module(IDS) * torch.tensor([[1.0, -2.0, 3.0]])).sum().backward()
    return ours, theirs


OF_COMPILER = {("rand_like", "state")}
"""The compiler's own error: it takes random functions into its graph without asking what they are called with."""

TARGETS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "parameter": (lambda ours: next(ours.parameters()), lambda theirs: theirs.weight),
    "gradient": (lambda ours: next(ours.parameters()).grad, lambda theirs: theirs.weight.grad),
    "state": (lambda ours: ours.state_dict()["rows"], lambda theirs: theirs.state_dict()["weight"]),
}


def called(function: Callable[[Any], Any], target: Any) -> Any:
    """What a compiled function gives, or its error; one that torch lets Python run is compiled no less."""
    graph = torch.compile(lambda each: function(each), backend="aot_eager")
    try:
        with torch.no_grad():
            return graph(target)
    except Exception as error:  # What torch itself refuses is of any kind.
        return error


def whole(values: GradientValues) -> Tensor:
    """The matrix, or its flat form, that values of a gradient are a part of."""
    rows = values.plain()
    matrix = values._rest.expand(NUM, DIM).clone()
    matrix[values.ids] = rows.view(-1, DIM)
    return matrix.view(-1) if rows.dim() == 1 else matrix


def plain(found: Any) -> Any:
    """Values without what they stand for."""
    if isinstance(found, tuple | list) and not isinstance(found, torch.Size):
        return [plain(each) for each in found]
    if not isinstance(found, Tensor):
        return found
    if isinstance(found, GradientValues):
        return whole(found)
    with torch._C.DisableTorchFunctionSubclass():
        return found.detach().as_subclass(Tensor).clone()


def held(ours: DistEmbedding) -> list[Any]:
    """The rows and the collected gradients."""
    return [ours.rows(), [(ids.clone(), rows.clone()) for _, ids, rows in ours.table.collected()]]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_is_as_over_a_matrix_or_refused(
    name: str, target: str, table_name: Callable[[], str]
) -> None:
    ours, theirs = pair(table_name())
    own, of_torch = TARGETS[target]
    function, before = FUNCTIONS[name], held(ours)
    found, expected = called(function, own(ours)), called(function, of_torch(theirs))
    if isinstance(found, Exception):
        assert f'"{ours.name}"' in str(found) or type(found) is type(expected) or (name, target) in OF_COMPILER, found
        assert str(held(ours)) == str(before)
        return
    assert not isinstance(expected, Exception), expected
    # What stands for rows or for a gradient is no matrix: what it stands for is compared below.
    if not isinstance(found, StandInGradient | RowsOfTable):
        torch.testing.assert_close(plain(found), plain(expected))
    torch.testing.assert_close(ours.rows(), theirs.weight.detach())
    assert theirs.weight.grad is not None
    for _, ids, grads in ours.table.collected():
        torch.testing.assert_close(grads, theirs.weight.grad[ids])


def measured(p: Any) -> Tensor:
    return torch.stack([each.norm() for each in (p.grad, p.grad.abs(), p.grad.view(-1) * 2)])


def clamped(p: Any) -> Tensor:
    p.grad = p.grad.clamp(-1, 1) * 0.5
    return p.grad.norm()


def branched(p: Any) -> Tensor:
    return torch.ones(1) if torch.isfinite(p.grad).all() else torch.zeros(1)


OF_GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 0.1),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 0.1),
    "get_total_norm": lambda p: nn.utils.get_total_norm([p.grad]),
    "norm": lambda p: sum(each.grad.norm() for each in [p]),
    "absolute maximum": lambda p: p.grad.abs().max(),
    "squares": lambda p: ((p.grad.detach() / 2) ** 2).sum().sqrt(),
    "mul_": lambda p: p.grad.mul_(0.5).norm(),
    "_foreach_abs": lambda p: torch._foreach_abs([p.grad])[0].sum(),  # type: ignore[attr-defined]
    "several": measured,
    "clamp": clamped,
    "branch": branched,
}


@pytest.mark.parametrize("function", OF_GRADIENTS.values(), ids=OF_GRADIENTS)
def test_compiled_code_measures_and_changes_gradients_as_python_does(
    function: Callable[[Any], Any], table_name: Callable[[], str]
) -> None:
    ours, theirs = pair(table_name())
    found = torch.compile(lambda: function(next(ours.parameters())), backend="aot_eager")()
    torch.testing.assert_close(plain(found), plain(function(theirs.weight)))
    assert theirs.weight.grad is not None
    [(_, ids, grads)] = ours.table.collected()
    torch.testing.assert_close(grads, theirs.weight.grad[ids])
