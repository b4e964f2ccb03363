"""Writes the graph of an exported program, see `recstore_ops.serving.graph`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from recstore_ops.serving.graph_operators import Operators, name_of
from recstore_ops.serving.size_functions import ORIGINALS
from recstore_ops.serving.structures import NoStructureError, written_structure

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_OF_TORCH = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}

_FILLED = {
    "aten::empty.memory_format": "aten::zeros.default",
    "aten::empty_like.default": "aten::zeros_like.default",
    "aten::new_empty.default": "aten::new_zeros.default",
}
"""Operators that fill memory, in place of those that leave it as it is: the old contents are never read."""


class NoGraphError(ValueError):
    """A program has what a graph has no words for."""


def written(program: ExportedProgram, operators: Operators | None = None) -> str:
    """Returns the graph of a program, as text.

    Args:
        program: of `torch.export.export`.
        operators: what the graph may call.

    Raises:
        NoGraphError: it has control flow, objects of its own, inputs that are no tensors, or changes its state.
        ValueError: it calls operators that a graph may not call.
    """
    allowed = operators or Operators()
    fields = _Writer(functional(program)).graph()
    called = dict.fromkeys(name for name, *_ in fields["calls"] if "::" in name)
    if refused := [name for name in called if not allowed.has(name)]:
        raise ValueError(
            f"a graph may not call {', '.join(refused)}: if those who open the bundle trust them, allow them here and "
            f"there by operators={refused}"
        )
    return json.dumps(fields, indent=None, separators=(",", ":"))


def functional(program: ExportedProgram) -> ExportedProgram:
    """Returns a program without operators that write to their arguments, which is the same one if it has none.

    Raises:
        NoGraphError: torch cannot do without them.
    """
    if not any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in program.graph.nodes):
        return program
    # Decompositions give ordered effects tokens as further inputs. Only this pass, which is private in torch, takes
    # them out.
    from torch.export._remove_effect_tokens_pass import _remove_effect_tokens

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Of torch's own calls.
            return _remove_effect_tokens(program.run_decompositions({}))
    except Exception as error:
        raise NoGraphError(f"a call that writes to its arguments, and torch cannot do without it: {error}") from error


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
            **self._structures(),
        }

    def _structures(self) -> dict[str, str]:
        specs = {"in_spec": self._program.call_spec.in_spec, "out_spec": self._program.call_spec.out_spec}
        try:
            return {name: written_structure(spec) for name, spec in specs.items() if spec is not None}
        except NoStructureError as error:
            raise NoGraphError(str(error)) from error

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
        name = _name_of(node)
        if name == "aten::empty.memory_format":
            kwargs.pop("memory_format", None)  # Of a tensor that is filled it says no more than how fast it is read.
        return [_FILLED.get(name, name), args, kwargs]

    def _argument(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            # `repr` gives the shortest text that is read back to the same bits.
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
    if node.op == "call_function" and isinstance(target, OpOverload):
        return name_of(target)
    if node.op == "call_function" and target in ORIGINALS:
        return ORIGINALS[target]
    if node.op == "get_attr":
        raise NoGraphError(_of_program(node))
    raise NoGraphError(f"a call of {getattr(target, '__name__', target)}")


def _of_program(node: Node) -> str:
    """Describes the operator that runs a program within the program: `torch.cond` and its like are control flow."""
    names = [str(user.target) for user in node.users]
    return f"control flow by {names[0]}" if names else "a program within it"
