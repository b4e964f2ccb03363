"""The tensors that an exported program takes and gives: names, types and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import SequenceKey, TreeSpec, tree_flatten_with_path, tree_unflatten

from recstore_ops.serving.sizes import Range

_ONLY = "output"


class Described(NamedTuple):
    """The inputs and outputs of a program.

    Attributes:
        inputs: a description of each, in their order; containers are taken apart.
        outputs: the same of each output; their names are the keys and places in what the model gave.
        ranges: the bounds of sizes that have some, by their names.
    """

    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]
    ranges: dict[str, Range]


def described(program: ExportedProgram, ranges: Mapping[str, Range]) -> Described:
    """Returns name, type and shape of each tensor that a program takes and gives; of what is none, name and class.

    A size that varies is -1 in `shape`, and has a name in `sizes`: sizes of one name are equal in every call.

    Args:
        program: of `torch.export.export`.
        ranges: the bounds of sizes, by torch's symbols.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    sizes: dict[str, str] = {}
    inputs = [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    outputs = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    taken = tuple(_described(arg.name, values.get(arg.name), arg, sizes) for arg in inputs)
    bounds = {sizes[symbol]: held for symbol, held in ranges.items()}
    given = zip(_names(program.call_spec.out_spec), outputs, strict=True)
    return Described(taken, tuple(_described(name, values.get(arg.name), arg, sizes) for name, arg in given), bounds)


def _described(name: str, value: Any, argument: Any, sizes: dict[str, str]) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"name": name, "type": type(getattr(argument, "value", value)).__name__}
    # A symbol of which export found that it is always one number reads as the number.
    names = [None if str(size).isdigit() else _renamed(str(size), sizes) for size in value.shape]
    return {
        "name": name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": [-1 if name else int(size) for size, name in zip(value.shape, names, strict=True)],
        "sizes": names,
    }


def _renamed(size: str, sizes: dict[str, str]) -> str:
    """A size as `n0` or `n0 + 1`: the numbers of torch's symbols depend on its version."""
    return re.sub(r"\b[su]\d+\b", lambda symbol: sizes.setdefault(symbol[0], f"n{len(sizes)}"), size)


def _names(structure: TreeSpec | None) -> list[str]:
    assert structure is not None, "torch.export gives it"
    leaves = tree_unflatten(range(structure.num_leaves), structure)
    names = [_name(path) for path, _ in tree_flatten_with_path(leaves)[0]]
    return names if len(set(names)) == len(names) else [f"{_ONLY}_{number}" for number in range(len(names))]


def _name(path: tuple[Any, ...]) -> str:
    """`logits` for the key of a dictionary, `output_1` for the second of a tuple, `output` for what is alone."""
    keys = [str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", None)))) for entry in path]
    if path and isinstance(path[0], SequenceKey):
        keys[0] = f"{_ONLY}_{keys[0]}"
    return ".".join(keys) or _ONLY
