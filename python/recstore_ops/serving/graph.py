"""An exported program as a list of operator calls: JSON that is read in milliseconds, without a compiler.

{"state": names of tensors, "inputs": how many, "calls": [...], "outputs": values, "in_spec": ..., "out_spec": ...}

Values are numbered: those of the state, the inputs, and what each call gives. A call names an operator of `torch.ops`,
or one of Python on sizes. Nothing else runs.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, treespec_dumps, treespec_loads

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_OF_SIZES = ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge", "getitem")
_OF_SIZES_BY_TORCH = ("sym_max", "sym_min", "sym_not", "sym_int", "sym_float")
_OF_TORCH = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}

Run = Callable[[Sequence[Any]], Sequence[Any]]


class NoGraphError(ValueError):
    """A program has what a graph has no words for."""


def written(program: ExportedProgram) -> str:
    """Returns the graph of a program, as text.

    Raises:
        NoGraphError: it has control flow, objects of its own, inputs that are no tensors, or changes its state.
    """
    return json.dumps(_Writer(program).graph(), indent=None, separators=(",", ":"))


class _Writer:
    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._values: dict[str, int] = {}
        self._count = 0

    def graph(self) -> dict[str, Any]:
        from torch.export.graph_signature import InputKind, OutputKind

        signature = self._program.graph_signature
        state = [spec for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT]
        inputs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        if unknown := [spec.kind.name for spec in state if spec.kind not in kinds]:
            raise NoGraphError(f"an input of kind {unknown[0]}")
        if changed := [spec for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]:
            raise NoGraphError(f"an output of kind {changed[0].kind.name}")
        for spec in (*state, *inputs):
            self._number(spec.arg.name)
        in_spec, out_spec = self._program.call_spec.in_spec, self._program.call_spec.out_spec
        assert in_spec is not None, "torch.export gives it"
        assert out_spec is not None, "torch.export gives it"
        nodes = {node.name: node for node in self._program.graph.nodes}
        if any(not isinstance(nodes[spec.arg.name].meta.get("val"), Tensor) for spec in inputs):
            raise NoGraphError("an input that is no tensor")
        calls = [self._call(node) for node in _needed([*nodes.values()]) if not self._has_value(node)]
        (given,) = nodes["output"].args
        return {
            "state": [spec.target for spec in state],
            "inputs": len(inputs),
            "calls": calls,
            "outputs": self._argument(given),
            "in_spec": treespec_dumps(in_spec),
            "out_spec": treespec_dumps(out_spec),
        }

    def _number(self, name: str) -> None:
        self._values[name], self._count = self._count, self._count + 1

    def _has_value(self, node: Node) -> bool:
        """Whether a value that is there stands for what a node gives."""
        if (same := _same_as(node)) is not None:
            self._values[node.name] = self._values[same.name]
        return node.name in self._values

    def _call(self, node: Node) -> list[Any]:
        args, kwargs = self._argument(node.args), {name: self._argument(each) for name, each in node.kwargs.items()}
        self._number(node.name)
        return [_name_of(node), args, kwargs]

    def _argument(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return {"float": repr(value)}
        if isinstance(value, list | tuple):
            return [self._argument(each) for each in value]
        if (name := getattr(value, "name", None)) in self._values:
            return {"value": self._values[name]}
        if kind := next((kind for cls, kind in _OF_TORCH.items() if isinstance(value, cls)), None):
            return {kind: str(value).removeprefix("torch.")}
        raise NoGraphError(f"an argument of class {type(value).__name__}")


def _needed(nodes: Sequence[Node]) -> list[Node]:
    """The calls that a program's outputs come of, and those that do more than give a value."""
    needed: list[Node] = []
    read: set[Node] = set()
    for node in reversed(nodes):
        if node in read or (node.is_impure() and not _says_types(node)):
            read.update(node.all_input_nodes if (same := _same_as(node)) is None else [same])
            needed.append(node)
    return [node for node in reversed(needed) if node.op not in ("placeholder", "output")]


def _says_types(node: Node) -> bool:
    """Whether a call only says which type a tensor has: that is known of every input, and so of all others."""
    return (
        node.target is torch.ops.aten._assert_tensor_metadata.default
        and len(node.args) == 1
        and not ({"size", "stride"} & node.kwargs.keys())
    )


def _same_as(node: Node) -> Node | None:
    """The tensor that a call gives as it is: of the type already, or without dropout."""
    if not node.all_input_nodes or node.kwargs:
        return None
    first, others = node.all_input_nodes[0], node.args[1:]
    is_cast = node.target is torch.ops.aten.to.dtype and others == (getattr(first.meta.get("val"), "dtype", None),)
    is_dropout = node.target is torch.ops.aten.dropout.default and others[1:] == (False,)
    return first if is_cast or is_dropout else None


def _name_of(node: Node) -> str:
    target = node.target
    if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
        return str(target.name()) + ("" if "." in target.name().rpartition("::")[2] else ".default")
    function = getattr(target, "__name__", None)
    for module, names in (("operator", _OF_SIZES), ("torch", _OF_SIZES_BY_TORCH)):
        if function in names and _of_sizes(f"{module}.{function}") is target:
            return f"{module}.{function}"
    raise NoGraphError(f"a call of {target}")


class Graph:
    """A graph that was read.

    Attributes:
        state: the names of the tensors that it needs.
        in_spec: how the inputs lie in the arguments of a call.
        out_spec: how the outputs lie in what it gives.

    Raises:
        ValueError: the text is no graph.
    """

    def __init__(self, text: str) -> None:
        graph = json.loads(text)
        self.state: list[str] = graph["state"]
        self.in_spec: TreeSpec = treespec_loads(graph["in_spec"])
        self.out_spec: TreeSpec = treespec_loads(graph["out_spec"])
        self._run = _Compiler(len(self.state), graph["inputs"], graph["calls"], graph["outputs"]).function()

    def bind(self, state: Mapping[str, Tensor]) -> Run:
        """Returns what gives the outputs, flat, of inputs, flat, with the tensors of a state."""
        tensors, run = tuple(state[name] for name in self.state), self._run
        return lambda inputs: run(*tensors, *inputs)


class _Compiler:
    """Makes a function of calls: Python's own interpreter is the fastest loop there is over them."""

    def __init__(self, state: int, inputs: int, calls: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._names: dict[str, Any] = {}
        self._last_use: dict[int, int] = {}
        self._values = state + inputs
        self._first = self._values
        for place, (_, args, kwargs) in enumerate(calls):
            for value in (*_values_in(args), *_values_in(list(kwargs.values()))):
                self._last_use[value] = place
        for value in _values_in(outputs):
            self._last_use[value] = len(calls)
        lines = [self._line(place, *call) for place, call in enumerate(calls)]
        parameters = ", ".join(f"v{value}" for value in range(self._first))
        self._source = "\n".join([f"def run({parameters}):", *lines, f" return {self._expression(outputs)}"])

    def function(self) -> Callable[..., Sequence[Any]]:
        """Returns what gives the outputs of a state and inputs."""
        exec(compile(self._source, "graph", "exec"), self._names)
        return self._names["run"]

    def _line(self, place: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        self._names[f"f{place}"] = _operator(name)
        given = [self._expression(each) for each in args]
        for key, each in kwargs.items():
            if not key.isidentifier():
                raise ValueError(f"{key!r} is no name of an argument")
            given.append(f"{key}={self._expression(each)}")
        value, self._values = self._values, self._values + 1
        target = f"v{value}" if value in self._last_use else "_"
        line = f" {target} = f{place}({', '.join(given)})"
        # What is not read any more goes, so that its memory can be used again.
        ended = [used for used in {*_values_in(args), *_values_in(list(kwargs.values()))} if used >= self._first]
        ended = [used for used in ended if self._last_use[used] == place]
        return line + "".join(f"; v{used} = None" for used in sorted(ended))

    def _expression(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int):
            return repr(value)
        if isinstance(value, list):
            return "[" + ", ".join(map(self._expression, value)) + "]"
        if isinstance(value, dict) and "value" in value:
            number = int(value["value"])
            if not 0 <= number < self._values:
                raise ValueError(f"a call reads value {number}, there are {self._values} before it")
            return f"v{number}"
        name = f"c{len(self._names)}"
        self._names[name] = _constant(value)
        return name


def _values_in(arguments: Any) -> list[int]:
    if isinstance(arguments, list | tuple):
        return [value for each in arguments for value in _values_in(each)]
    return [int(arguments["value"])] if isinstance(arguments, dict) and "value" in arguments else []


def _constant(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, text),) = value.items()
        if kind == "float":
            return float(text)
        if kind == "device":
            return torch.device(text)
        for cls, name in _OF_TORCH.items():
            if kind == name and isinstance(found := getattr(torch, text, None), cls):
                return found
    raise ValueError(f"{value!r} is no argument of a call")


def _operator(name: str) -> Callable[..., Any]:
    namespace, _, rest = name.partition("::")
    if not rest:
        return _of_sizes(name)
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise ValueError(f"this version of torch has no operator {name}") from None


def _of_sizes(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    if module == "operator" and function in _OF_SIZES:
        return getattr(operator, function)
    if module == "torch" and function in _OF_SIZES_BY_TORCH:
        return getattr(torch, function)
    raise ValueError(f"{name} is no function of a graph")
