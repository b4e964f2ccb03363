"""Calls every function of torch that can be overridden on what stands for a table, and beside it on `nn.Embedding`.

python tests/python/overridable.py    # writes what works into docs/pytorch_idioms.md
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions, get_testing_overrides, resolve_name
from torch.testing._internal.generated.annotated_fn_args import annotated_args

from recstore_ops import DistEmbedding
from recstore_ops.nn.gradient_values import GradientValues
from recstore_ops.nn.table_parameter import StandInGradient, TableParameter
from recstore_ops.nn.table_rows import RowsOfTable
from recstore_ops.ops import operators

PAGE = Path(__file__).parents[2] / "docs" / "pytorch_idioms.md"
BEGIN, END = "<!-- functions: tests/python/overridable.py writes this table -->\n", "<!-- end of functions -->\n"
# A square that is symmetric and positive definite is an argument of most functions of matrices.
SIZE = 4
IDS, ALL = torch.tensor([1, 2]), torch.arange(SIZE)
START = torch.eye(SIZE) + 0.5 + (torch.arange(16.0).view(SIZE, SIZE) + torch.arange(16.0).view(SIZE, SIZE).T) / 64
OTHER = torch.full((SIZE, SIZE), 0.5)
SUBJECT, LIST = object(), object()
"""The places in a list of arguments of what is tried, alone and in a list."""

_ALONE: list[Any] = [
    *(1, 0.5, 0, OTHER, torch.tensor([0, 1]), torch.tensor(True), (SIZE, SIZE), torch.float64, "mean", [1], OTHER[0]),
    *(None, -1, slice(None), START > 0.5, (0, 1)),
]
_FEW: list[Any] = [1, 0.5, OTHER, 0, torch.tensor([0, 1])]
_FILLERS: list[Any] = [OTHER, 1, [OTHER], (1, 1), None, "mean", abs, {}, torch.float32, False]
_number = itertools.count()


class Named(NamedTuple):
    """Arguments that have names."""

    values: dict[str, Any]


_BY_HAND: dict[str, list[Any]] = {
    "index_put": [SUBJECT, (torch.tensor([0]),), torch.tensor(1.0)],
    "index_put_": [SUBJECT, (torch.tensor([0]),), torch.tensor(1.0)],
    "nonzero_static": [SUBJECT, Named({"size": 3})],
    "solve_triangular": [SUBJECT, OTHER, Named({"upper": True})],
    "__format__": [SUBJECT, ""],
    "__deepcopy__": [SUBJECT, {}],
}
"""What no search finds."""


class Side:
    """A module of one kind, with gradients of one pass."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        if name is None:
            self.module: Any = nn.Embedding.from_pretrained(START.clone(), freeze=False)
        else:
            self.module = DistEmbedding(SIZE, SIZE, name, optimizer={"kind": "sgd", "lr": 1.0})
            self.module.weight[ALL] = START
        (self.module(IDS) * 4).sum().backward()
        [self.parameter] = self.module.parameters()

    def rows(self) -> Tensor:
        """The rows of all ids, `[N, D]`."""
        return self.module.weight.detach().clone() if self.name is None else self.module.weight[ALL]

    def gradient(self) -> Tensor:
        """The gradient of all rows, `[N, D]`."""
        if self.name is None:
            grad = self.parameter.grad
            return torch.zeros(SIZE, SIZE) if grad is None else grad.detach().clone()
        full = torch.zeros(SIZE, SIZE)
        for _, ids, grads in self.module.table.collected():
            full[ids] = grads
        return full

    def state(self) -> list[Any]:
        """All that a call may change."""
        return [self.rows(), self.gradient(), self.parameter.requires_grad]


def value_in_state(side: Side) -> Any:
    state = side.module.state_dict()
    return state["rows"] if side.name else state["weight"].clone()


SUBJECTS: dict[str, Callable[[Side], Any]] = {
    "parameter": lambda side: side.parameter,
    "parameter, under no_grad": lambda side: side.parameter,
    "data": lambda side: side.parameter.data,
    "grad": lambda side: side.parameter.grad,
    "value in a state": value_in_state,
    "weight": lambda side: side.module.weight,
}


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """All functions that torch lets types override, by name."""
    found = {id(each): each for of_module in get_overridable_functions().values() for each in of_module}
    return {resolve_name(each) or repr(each): each for each in found.values()}


@cache
def arguments() -> dict[str, list[Any]]:
    """Arguments with which each function takes a matrix, where some were found."""
    found: dict[str, list[Any]] = {}
    for name, function in functions().items():
        for args in [by_hand] if (by_hand := _BY_HAND.get(name.split(".")[-1])) else _candidates():
            try:
                with torch.no_grad(), _quiet():
                    result = called(function, name, args, START.clone())
            except Exception:  # Any error says that these are not its arguments.
                continue
            if result is not NotImplemented:
                found[name] = args
                break
    return found


def _candidates() -> Iterator[list[Any]]:
    yield [SUBJECT]
    yield from ([SUBJECT, each] for each in _ALONE)
    yield [LIST]
    yield from ([LIST, each] for each in _ALONE)
    yield from ([each, SUBJECT] for each in _ALONE)
    yield from ([SUBJECT, *others] for others in itertools.product(_ALONE, repeat=2))
    yield from ([SUBJECT, *others] for others in itertools.product(_FEW, repeat=3))


def fallbacks(name: str) -> Iterator[list[Any]]:
    """Arguments that are taken for such at least, for functions that take no matrix."""
    function = functions()[name]
    if function in annotated_args:
        yield _annotated(annotated_args[function])
    override = get_testing_overrides().get(function)
    needed = 1 if override is None else len(inspect.signature(override).parameters)
    for count in range(max(needed, 1) + 2):
        for filler in _FILLERS:
            yield [SUBJECT, *[filler] * count]
            yield [SUBJECT, OTHER, *[filler] * count]
            yield [LIST, *[filler] * count]


def _annotated(signature: list[dict[str, Any]]) -> list[Any]:
    args: list[Any] = []
    for each in signature:
        kind = each["simple_type"]
        if each["is_kwarg_only"] == "True":
            continue
        if kind in ("Tensor", "TensorList"):
            is_first = not any(arg is SUBJECT or arg is LIST for arg in args)
            args.append((SUBJECT if kind == "Tensor" else LIST) if is_first else OTHER if kind == "Tensor" else [OTHER])
        elif kind.startswith(("IntArrayRef", "SymIntArrayRef")):
            args.append([1] * int(each.get("size", 1) or 1))
        else:
            known = {
                "Scalar": 0.5,
                "double": 0.5,
                "int64_t": 1,
                "SymInt": 1,
                "bool": False,
                "ScalarType": torch.float32,
            }
            args.append("mean" if "string" in kind else known.get(kind))
    return args


def called(function: Callable[..., Any], name: str, args: list[Any], subject: Any) -> Any:
    """Calls a function with a subject in its place, one of `Tensor` as programs do."""
    places = {id(SUBJECT): subject, id(LIST): [subject]}
    given = [places.get(id(each), each.clone() if isinstance(each, Tensor) else each) for each in args]
    named = given.pop().values if isinstance(given[-1], Named) else {}
    if name.endswith(".__get__"):
        return getattr(subject, name.split(".")[-2])
    if name.startswith("torch.Tensor.") and args[0] is SUBJECT:
        return getattr(subject, name.removeprefix("torch.Tensor."))(*given[1:], **named)
    return function(*given, **named)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def plain(value: Any, side: Side) -> Any:
    """A result as a value of torch: what stands for a matrix as that matrix."""
    if isinstance(value, StandInGradient):
        return side.gradient()
    if isinstance(value, TableParameter):
        return side.rows()
    if isinstance(value, RowsOfTable):
        return sum(share * operators.emb_read(table.handle, ALL, SIZE) for table, share in value._terms.values())
    if isinstance(value, GradientValues):
        full = torch.full((SIZE, SIZE), value._rest.item(), dtype=value.dtype)
        full[value.ids] = value.plain().reshape(-1, SIZE)
        return full.reshape(tuple(value.shape))
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().as_subclass(Tensor) if value.layout == torch.strided else value.detach()
    return [plain(each, side) for each in value] if isinstance(value, list | tuple) else value


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are alike; a NaN is like another."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
            return False
        if one.layout != torch.strided:
            return same(one.to_dense(), other.to_dense())
        return torch.allclose(one.to(torch.complex128), other.to(torch.complex128), equal_nan=True)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def call(name: str, args: list[Any], subject: str, side: Side) -> tuple[Any, Exception | None]:
    """What a call gives, or its error."""
    torch.manual_seed(0)
    try:
        with torch.set_grad_enabled(subject == "parameter"), _quiet():
            return called(functions()[name], name, args, SUBJECTS[subject](side)), None
    except Exception as error:  # Every error is a result here.
        return None, error


def outcomes(subject: str, names: Callable[[], str]) -> dict[str, str]:
    """What each function does with a subject: `equal`, `refused`, or what is wrong."""
    found: dict[str, str] = {}
    ours, theirs = Side(names()), Side(None)
    for name in functions():
        before = ours.state(), theirs.state()
        if (args := arguments().get(name)) is not None:
            found[name] = _compared(name, args, subject, ours, theirs)
        elif subject != "value in a state":  # Such a value takes part in all that reads, as any tensor.
            found[name] = _refused(name, subject, ours)
        after = ours.state(), theirs.state()
        if not same(list(before), list(after)):
            if found.get(name) == "refused" and not same(before[0], after[0]):
                found[name] = "refused, and changed something"
            ours, theirs = Side(names()), Side(None)
    return found


def _compared(name: str, args: list[Any], subject: str, ours: Side, theirs: Side) -> str:
    given, error = call(name, args, subject, ours)
    if error is not None:
        return "refused" if str(ours.name) in str(error) else f"an error of torch: {error}"
    expected, error = call(name, args, subject, theirs)
    if error is not None:
        return f"no error, as of torch: {error}"
    if not same(plain(given, ours), plain(expected, theirs)):
        return f"{given} for {expected}"
    return "equal" if same(ours.state(), theirs.state()) else "another change of the rows or gradients"


def _refused(name: str, subject: str, ours: Side) -> str:
    text = "no call"
    for args in fallbacks(name):
        given, error = call(name, args, subject, ours)
        if error is None and given is not NotImplemented:
            return f"{given}, without a comparison"
        if error is not None and str(ours.name) in str(error):
            return "refused"
        text = f"no call: {error}"
    return text


def page(found: dict[str, dict[str, str]]) -> str:
    """The table of the page, of the outcomes by subject."""
    lines = ["| over | works as over a matrix |", "|---|---|"]
    for subject, of_subject in found.items():
        works = sorted({_written(name) for name, outcome in of_subject.items() if outcome == "equal"})
        if 0 < len(works) < 400:
            lines.append(f"| {subject} | {', '.join(f'`{name}`' for name in works if not is_private(name))} |")
    return "\n".join(lines) + "\n"


def _written(name: str) -> str:
    return name.removeprefix("torch.").removesuffix(".__get__")


def is_private(name: str) -> bool:
    """Whether the name is one of those that torch keeps to itself."""
    return name.split(".")[-1].startswith("_") and not name.endswith("__")


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    found = {subject: outcomes(subject, lambda: f"table {next(_number)}") for subject in SUBJECTS}
    PAGE.write_text(before + BEGIN + page(found) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
