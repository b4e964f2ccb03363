"""The operators that graphs may call: those of a list in this package, and those that a caller names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch._C import FunctionSchema
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from recstore_ops.serving.closed_json import shown
from recstore_ops.serving.size_functions import FUNCTIONS

_LIST = Path(__file__).with_name("graph_operators.txt")
_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", re.ASCII)


class Operators:
    """The operators that a graph may call.

    Attributes:
        further: the names of operators beyond the list, which the caller allows.

    Raises:
        ValueError: a further one is no name of an operator.
    """

    def __init__(self, further: Iterable[str] = ()) -> None:
        if isinstance(further, str):
            raise ValueError(f"operators takes a list of names, got {further!r}")
        self.further = tuple(map(_checked, further))

    def has(self, name: str) -> bool:
        """Whether a graph may call an operator."""
        return name in self.further or name in listed()

    def find(self, name: str) -> OpOverload:
        """Returns an operator.

        Raises:
            ValueError: it is not listed, this release of torch lacks it, or has it with another schema.
        """
        if not self.has(name):
            raise ValueError(
                f"{shown(name)} is not in the list of operators that a graph may call; the caller can allow further "
                "ones, by operators=[...] or --operators"
            )
        if (found := _registered(name)) is None:
            raise ValueError(f"this process has no operator {name}, torch is {torch.__version__}")
        if name not in self.further and not _is(listed()[name], found._schema):
            raise ValueError(f"this release of torch has {found._schema}, the graph needs {listed()[name]}")
        return found


def _checked(name: object) -> str:
    if not isinstance(name, str) or not (parts := _NAME.fullmatch(name)):
        raise ValueError(f"operators takes names as NAMESPACE::NAME or NAMESPACE::NAME.OVERLOAD, got {name!r}")
    return name if parts[1] else f"{name}.default"


def name_of(overload: OpOverload) -> str:
    """Returns what graphs call an operator."""
    name = overload._schema.name
    return f"{name}.{overload._schema.overload_name or 'default'}"


@cache
def listed() -> Mapping[str, str]:
    """The schemas of the operators of the list, by the names that graphs use."""
    found: dict[str, str] = {}
    for line in _LIST.read_text(encoding="utf-8").splitlines():  # by path: the package's own
        name = line.partition("(")[0]
        if line.startswith("#") or name in FUNCTIONS:
            continue
        found[name if "." in name else f"{name}.default"] = line
    return found


def _is(text: str, schema: FunctionSchema) -> bool:
    # Releases may print one schema in two ways.
    return str(schema) == text or torch._C.parse_schema(text) == schema


def _registered(name: str) -> OpOverload | None:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(torch.ops, namespace, None)
    for part, expected in ((packet, _OpNamespace), (overload, OpOverloadPacket)):
        if not isinstance(found, expected):
            return None
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None
