"""The functions on sizes without Python give what Python's give, and refuse what has no result of 64 bits."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from graph_programs import Answer, Program, stored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_programs import ONLY_TORCH, Runtime

pytestmark = [pytest.mark.tier("all"), ONLY_TORCH]

Number: TypeAlias = "bool | int | float"

BINARY = (
    *("operator.add", "operator.sub", "operator.mul", "operator.floordiv", "operator.truediv", "operator.mod"),
    *("operator.eq", "operator.ne", "operator.lt", "operator.le", "operator.gt", "operator.ge"),
    *("torch.sym_max", "torch.sym_min"),
)
UNARY = ("operator.neg", "torch.sym_not", "torch.sym_int", "torch.sym_float")
EDGES: tuple[Number, ...] = (
    *(0, 1, -1, 2, 3, -7, 10, True, False),
    *(2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 1, -(2**63), -(2**63) + 1, -(2**53) - 1),
    *(0.0, -0.0, 1.0, 0.1, -0.1, 0.3, -3.5, 1e16, 2.0**53, 2.0**63, -(2.0**63), 2.0**64, 1e308, 5e-324),
    *(float("inf"), float("-inf"), float("nan")),
)
NUMBERS = st.one_of(
    st.sampled_from(EDGES),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.integers(-9, 9),
    st.booleans(),
)
CASES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(BINARY), st.tuples(NUMBERS, NUMBERS)),
        st.tuples(st.sampled_from(UNARY), st.tuples(NUMBERS)),
    ),
    min_size=100,
    max_size=300,
)

Case: TypeAlias = "tuple[str, tuple[Number, ...]]"


def of_python(case: Case) -> Number | None:
    """What Python gives, None if it raises or has no 64 bits for it."""
    name, numbers = case
    module, _, function = name.partition(".")
    call: Callable[..., Any] = getattr(operator if module == "operator" else torch, function)
    try:
        result = call(*numbers)
    except (ArithmeticError, ValueError):
        return None
    return None if type(result) is int and not -(2**63) <= result < 2**63 else result


def written(number: Number) -> Any:
    return {"float": repr(number)} if isinstance(number, float) else number


DTYPES = {bool: "bool", int: "int64", float: "float64"}


def showing(value: int, number: Number) -> list[Any]:
    """Calls that give tensors of a number: its bits, and of what is no float its type."""
    of_type = ["aten::full.default", [[1], {"value": value}], {"dtype": {"dtype": DTYPES[type(number)]}}]
    of_itself = ["aten::full.default", [[1], {"value": value}], {}]
    return [of_type, of_type if isinstance(number, float) else of_itself]


def shown(number: Number) -> list[torch.Tensor]:
    return [torch.full([1], number, dtype=getattr(torch, DTYPES[type(number)]))] * 2


def program_of(cases: Sequence[Case]) -> Program:
    """The functions, those first, each shown by two outputs."""
    calls: list[Any] = [[name, list(map(written, numbers)), {}] for name, numbers in cases]
    results = [result for case in cases if (result := of_python(case)) is not None]
    calls += [call for value, result in enumerate(results) for call in showing(value, result)]
    gives = [tensor for result in results for tensor in shown(result)]
    return Program(calls, range(len(cases), len(calls)), gives=gives)


def check(runtime: Runtime, folder: Path, cases: Sequence[Case]) -> None:
    """Those that Python answers give its results; each of the others is refused alone."""
    answered = [case for case in cases if of_python(case) is not None]
    refused = [case for case in cases if of_python(case) is None]
    programs = [program_of(answered), *(program_of([case]) for case in refused)]
    folders = [program.write(folder / str(place)) for place, program in enumerate(programs)]
    wanted = [result for case in answered if (result := of_python(case)) is not None]
    for language in ("rust", "cpp"):
        first, *others = runtime.answers(language, folders)
        assert first.refused == ""
        for case, result, place in zip(answered, wanted, itertools.count(0, 2), strict=False):
            assert first.outputs[place : place + 2] == tuple(map(stored, shown(result))), (language, case, result)
        for case, answer in zip(refused, others, strict=True):
            assert is_refusal(answer, case), (language, case, answer)


def is_refusal(answer: Answer, case: Case) -> bool:
    reasons = ("division by zero", "the result has more than 64 bits", "there is no such integer")
    return any(answer.refused.endswith(f"{case[0]}: {reason}") for reason in reasons)


def test_edges_give_what_python_gives(runtime: Runtime, tmp_path: Path) -> None:
    pairs = itertools.product(BINARY, itertools.product(EDGES, repeat=2))
    check(runtime, tmp_path, [*pairs, *itertools.product(UNARY, itertools.product(EDGES))])


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases=CASES)
def test_any_numbers_give_what_python_gives(
    runtime: Runtime, tmp_path_factory: pytest.TempPathFactory, cases: list[Case]
) -> None:
    check(runtime, tmp_path_factory.mktemp("sizes"), cases)


SPLIT = ["aten::split.Tensor", [{"value": 0}, 1], {}]


@pytest.mark.parametrize("place", [-4, -3, -1, 0, 2, 3, 2**62, -(2**63), True])
def test_elements_are_those_of_python(runtime: Runtime, tmp_path: Path, place: int) -> None:
    tensor = torch.arange(3)
    calls = [SPLIT, ["operator.getitem", [{"value": 1}, place], {}]]
    folder = Program(calls, [2], [tensor], [tensor[:1]]).write(tmp_path / "program")
    for language in ("rust", "cpp"):
        (answer,) = runtime.answers(language, [folder])
        if -3 <= place < 3:
            assert answer.outputs == (stored(tensor.split(1)[place]),)
        else:
            assert answer.refused == f"operator.getitem: element {place} of 3"


@pytest.mark.parametrize(
    "call",
    [
        ["operator.add", [1], {}],
        ["operator.add", [1, 2, 3], {}],
        ["operator.add", [1], {"b": 2}],
        ["operator.add", [1, "a"], {}],
        ["operator.mul", [1, [2]], {}],
        ["operator.neg", [None], {}],
        ["operator.add", [1, {"value": 0}], {}],
        ["operator.eq", [{"value": 0}, {"value": 0}], {}],
        ["operator.getitem", [{"value": 0}, 0], {}],
        ["operator.getitem", [1, 0], {}],
    ],
)
def test_what_is_no_size_is_refused(runtime: Runtime, tmp_path: Path, call: list[Any]) -> None:
    tensor = torch.arange(3)
    folder = Program([call], [0], [tensor], [tensor]).write(tmp_path / "program")
    for language in ("rust", "cpp"):
        (answer,) = runtime.answers(language, [folder])
        assert f"{call[0]}: it takes " in answer.refused
