"""What a bundle takes and gives, in the protocol's words, and whether requests can be joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recstore_ops.serving.bundle import Bundle
from recstore_ops.serving.door.datatypes import Datatype, datatype_of


@dataclass(frozen=True)
class TensorSpec:
    """An input or output.

    Attributes:
        name: in requests and answers.
        datatype: of its elements.
        shape: a number for each dimension that is fixed; for one that varies a text, equal where dimensions must be.
    """

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]

    @property
    def public_shape(self) -> list[int]:
        """The shape as the protocol shows it, -1 for what varies."""
        return [size if isinstance(size, int) else -1 for size in self.shape]

    def __str__(self) -> str:
        return f"{self.name} {self.datatype.name} {self.public_shape}"


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a bundle.

    Attributes:
        inputs: in the order of the program's arguments.
        outputs: in the order in which the program gives them.
        alone: why requests are not joined; None: their first dimensions are rows of one batch.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    alone: str | None

    @classmethod
    def of(cls, bundle: Bundle) -> Signature:
        """Reads it from a bundle's manifest and program.

        Raises:
            ValueError: the protocol cannot carry an input or output.
        """
        graph = bundle.get_submodule("_program")
        inputs = tuple(_input(described, node) for described, node in _arguments(bundle, graph))
        outputs = _outputs(graph)
        return cls(inputs, outputs, _reason_to_run_alone(inputs, outputs))


def _arguments(bundle: Bundle, graph: Any) -> list[tuple[dict[str, Any], Any]]:
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    described = bundle.manifest.inputs
    if len(nodes) != len(described):
        raise ValueError(f"the program takes {len(nodes)} inputs, the manifest names {len(described)}")
    return list(zip(described, nodes, strict=True))


def _input(described: dict[str, Any], node: Any) -> TensorSpec:
    if "dtype" not in described:
        raise ValueError(f"input {node.target!r} is of type {described['type']}; requests carry tensors only")
    name = described["name"]
    dtype = getattr(torch, described["dtype"])
    return TensorSpec(name, datatype_of(dtype, f"input {name!r}"), _shape(node.meta["val"]))


def _outputs(graph: Any) -> tuple[TensorSpec, ...]:
    (node,) = (node for node in graph.graph.nodes if node.op == "output")
    leaves = pytree.tree_leaves(node.args[0])
    names = _names(graph._out_spec, len(leaves))
    return tuple(_output(name, leaf) for name, leaf in zip(names, leaves, strict=True))


def _output(name: str, leaf: Any) -> TensorSpec:
    value = getattr(leaf, "meta", {}).get("val", leaf)
    if not isinstance(value, Tensor):
        raise ValueError(f"output {name!r} is of type {type(value).__name__}; answers carry tensors only")
    return TensorSpec(name, datatype_of(value.dtype, f"output {name!r}"), _shape(value))


def _shape(value: Tensor) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def _names(spec: pytree.TreeSpec, count: int) -> list[str]:
    """Names outputs: a single one `output`, those of a dictionary by its keys, others by their numbers."""
    try:
        paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(range(count), spec))[0]]
    except ValueError:  # Some class gives no names of its parts.
        return [f"output_{number}" for number in range(count)]
    names = [_name(path) for path in paths]
    return names if len(set(names)) == count else [f"output_{number}" for number in range(count)]


def _name(path: Sequence[Any]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))) for key in path]
    if path and isinstance(path[0], pytree.SequenceKey):
        parts[0] = f"output_{parts[0]}"
    return ".".join(parts) or "output"


def _reason_to_run_alone(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
    """Requests can be joined if the exported program itself says that one size is first everywhere, and nowhere else:
    export gives two dimensions one symbol only where they must be equal."""
    rows = inputs[0].shape[0] if inputs and inputs[0].shape else None
    for spec in (*inputs, *outputs):
        if not spec.shape:
            return f"{spec.name} has no dimensions"
        if isinstance(spec.shape[0], int):
            return f"the first dimension of {spec.name} is always {spec.shape[0]}"
        if spec.shape[0] != rows:
            return f"the first dimensions of {inputs[0].name} and {spec.name} vary on their own"
        if any(str(rows) in str(size) for size in spec.shape[1:]):
            return f"a later dimension of {spec.name} varies with the first"
    return None if inputs else "there are no inputs"
