"""The tensors that an exported program takes and gives: names, types and shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten_with_path

_ONLY = "output"


class Described(NamedTuple):
    """What a program takes and gives.

    Attributes:
        inputs: a description of each, in their order; containers are taken apart.
        outputs: the same of each output; their names are the keys and places in what the model gave.
    """

    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]


def described(program: ExportedProgram, example: Any) -> Described:
    """Returns name, type and shape of each tensor that a program takes and gives; of what is none, name and class.

    A size that varies is -1 in `shape`, and has a name in `sizes`: sizes of one name are equal in every call.

    Args:
        program: of `torch.export.export`.
        example: what the model gave.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature, sizes = program.graph_signature, {}
    inputs = [(str(node), node) for node in signature.user_inputs]
    names = [_name(path) for path, _ in tree_flatten_with_path(example)[0]]
    outputs = zip(names, signature.user_outputs, strict=True)
    taken, given = (
        tuple(_described(name, values[node], sizes) for name, node in nodes if node in values)
        for nodes in (inputs, outputs)
    )
    return Described(taken, given)


def _described(name: str, value: Any, sizes: dict[str, str]) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"name": name, "type": type(value).__name__}
    names = [None if isinstance(size, int) else sizes.setdefault(str(size), f"n{len(sizes)}") for size in value.shape]
    return {
        "name": name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": [-1 if name else int(size) for size, name in zip(value.shape, names, strict=True)],
        "sizes": names,
    }


def _name(path: tuple[Any, ...]) -> str:
    """`logits` for the key of a dictionary, `output_1` for the second of a tuple, `output` for what is alone."""
    keys = [str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))) for entry in path]
    return "_".join(keys if keys and not keys[0].isdigit() else [_ONLY, *keys])
