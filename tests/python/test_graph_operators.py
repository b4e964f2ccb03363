"""The list of operators that graphs may call: what may be in it, and that nothing else of `torch.ops` resolves."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

import recstore_ops.serving as serving
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.graph_arguments import _FORMS
from recstore_ops.serving.graph_operators import Operators, listed
from recstore_ops.serving.size_functions import FUNCTIONS, OPERANDS

pytestmark = pytest.mark.tier("test")

LIST = Path(serving.__file__).parent / "graph_operators.txt"
LEAF = json.dumps([1, {"type": None, "context": None, "children_spec": []}])
ARGUMENTS = json.dumps(
    [1, {"type": "builtins.tuple", "context": "null", "children_spec": [json.loads(LEAF)[1]]}],
)
RANDOM = {
    *("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout", "gru", "lstm", "rnn_relu", "rnn_tanh"),
    "scaled_dot_product_attention",
}
"""Operators of the list that draw random numbers, unless an argument of them that must be constant says otherwise."""
OF_STATISTICS = {"batch_norm", "instance_norm", "_native_batch_norm_legit_no_training"}
"""Of these, two write to statistics in training, which their schemas do not say: constants must say otherwise."""


def found() -> dict[str, OpOverload]:
    """The operators of the list that this release of torch has."""
    operators = Operators()
    names: dict[str, OpOverload] = {}
    for name in listed():
        # Of other releases some may be missing or have another schema.
        with nullcontext() if torch.__version__.startswith("2.13.0") else suppress(ValueError):
            names[name] = operators.find(name)
    return names


def test_the_list_is_what_torch_has_and_the_functions_on_sizes() -> None:
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    functions = [line for line in lines if "::" not in line]
    assert sorted(functions) == functions == sorted(FUNCTIONS)
    schemas = lines[len(functions) :]
    assert sorted(schemas) == schemas
    assert len(set(schemas)) == len(schemas) == len(listed())
    assert len(found()) > 0.95 * len(schemas)


def test_what_is_listed_only_computes() -> None:
    for name, overload in found().items():
        schema = overload._schema
        assert name.startswith(("aten::", "recstore::"))
        assert not schema.is_mutable, name
        kinds = {str(each.real_type) for each in schema.arguments}
        bare = {kind.removeprefix("Optional[").removeprefix("List[").removeprefix("Optional[") for kind in kinds}
        assert {kind.rstrip("]") for kind in bare} <= _FORMS.keys(), name
        packet = schema.name.removeprefix("aten::")
        assert (torch.Tag.nondeterministic_seeded in overload.tags) == (packet in RANDOM), name
        constants = {argument.name for argument in schema.arguments} & {"train", "dropout_p"}
        assert bool(constants) == (packet in RANDOM), name
        assert any(argument.name.startswith("running_") for argument in schema.arguments) == (
            packet in OF_STATISTICS
        ), name
    assert not {"from_file", "resize_", "set_", "empty", "as_strided"} & {
        name.partition(".")[0][6:] for name in listed()
    }


def names_of_torch() -> Iterator[str]:
    """All names `A::B.C` that lead anywhere from `torch.ops`, over operators and attributes of any object."""
    spaces = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()} | set(dir(torch.ops))
    for space in sorted(spaces):
        inner = getattr(torch.ops, space, None)
        packets = {name.partition("::")[2].partition(".")[0] for name in operators_of(space)} | set(dir(inner))
        for packet in sorted(packets):
            outer = getattr(inner, packet, None)
            overloads = set(dir(outer)) | {"default"}
            if isinstance(outer, torch._ops.OpOverloadPacket):
                overloads |= set(outer.overloads())
            for overload in sorted(overloads):
                yield f"{space}::{packet}.{overload}"


def operators_of(space: str) -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{space}::")]


def test_nothing_else_of_torch_resolves() -> None:
    operators, resolved, refused = Operators(), set(), 0
    for name in names_of_torch():
        if not operators.has(name):
            assert is_refused(operators, name), name
            refused += 1
            continue
        overload = operators.find(name)
        assert isinstance(overload, OpOverload)
        assert torch._C.parse_schema(listed()[name]) == overload._schema
        resolved.add(name)
    assert resolved == found().keys()
    assert refused > 100_000


def is_refused(operators: Operators, name: str) -> bool:
    """Whether a name is refused; `pytest.raises` would take most of the time."""
    try:
        operators.find(name)
    except ValueError as error:
        return "is not in the list of operators that a graph may call" in str(error)
    return False


def graph_of(*calls: list[object]) -> str:
    """A graph of one input that gives what the last call gives."""
    outputs = [{"value": len(calls)}]
    fields = {"state": [], "inputs": 1, "calls": calls, "outputs": outputs, "in_spec": ARGUMENTS, "out_spec": LEAF}
    return json.dumps(fields)


def test_no_other_function_of_python_is_called() -> None:
    modules = {"operator": operator, "torch": torch, "builtins": __builtins__, "os": __import__("os")}
    for module, held in modules.items():
        for name in dir(held):
            if (called := f"{module}.{name}") not in FUNCTIONS:
                with pytest.raises(ValueError, match="is not in the list of operators"):
                    Graph(graph_of([called, [{"value": 0}], {}]))


def _original(module: str, name: str) -> Callable[..., Any]:
    # Torch's own imports sympy.
    return operator.not_ if name == "sym_not" else getattr({"operator": operator, "torch": torch}[module], name)


NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([0, 1, -1, 1 << 62, -(1 << 63)]), st.floats(), st.booleans()
)


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(OPERANDS)))
def test_sizes_are_those_of_python_within_64_bits(data: st.DataObject, name: str) -> None:
    operands = data.draw(st.lists(NUMBERS, min_size=OPERANDS[name], max_size=OPERANDS[name]))
    module, _, function = name.partition(".")
    try:
        expected = _original(module, function)(*operands)
        fits = type(expected) is not int or -(1 << 63) <= expected < 1 << 63
    except (ArithmeticError, ValueError):
        expected, fits = None, False
    if fits:
        result = FUNCTIONS[name](*operands)
        assert type(result) is type(expected)
        assert result == expected or result != result
    else:
        with pytest.raises(ValueError, match=rf"{function} of |{name}"):
            FUNCTIONS[name](*operands)


def test_a_caller_allows_exact_names() -> None:
    assert Operators(["aten::rand"]).find("aten::rand.default") is torch.ops.aten.rand.default
    for name in ("aten::rand.generator", "aten::from_file.default"):
        with pytest.raises(ValueError, match="is not in the list of operators"):
            Operators(["aten::rand"]).find(name)
    for wrong in ("rand", "aten::", "aten::rand.default.more", "aten::rand default", "a b::c", 7):
        with pytest.raises(ValueError, match="operators takes names as NAMESPACE::NAME"):
            Operators([wrong])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="operators takes a list of names, got 'aten::rand'"):
        Operators("aten::rand")
    for absent in ("mylib::op", "load_library::__globals__.__getitem__", "aten::__class__.__init__", "aten::add.name"):
        with pytest.raises(ValueError, match="this process has no operator"):
            Operators([absent]).find(absent if "." in absent else f"{absent}.default")
