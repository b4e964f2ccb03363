"""The inputs and outputs of a bundle in the terms of the protocol, and whether requests can be joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recstore_ops.serving.bundle import Bundle
from recstore_ops.serving.server.datatypes import Datatype, datatype_of


@dataclass(frozen=True)
class TensorSpec:
    """An input or output.

    Attributes:
        name: in requests and answers.
        datatype: of its elements.
        shape: a number for each fixed dimension, and a text for each that varies. Dimensions that must be equal have
            the same text.
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
        """Reads it from a bundle's manifest.

        Raises:
            ValueError: the protocol cannot carry an input or output.
        """
        inputs, outputs = bundle.manifest.inputs, bundle.manifest.outputs
        taken = tuple(_spec(described, "input", "requests carry") for described in inputs)
        given = tuple(_spec(described, "output", "answers carry") for described in outputs)
        return cls(taken, given, _reason_to_run_alone(taken, given))


def _spec(described: dict[str, Any], kind: str, carry: str) -> TensorSpec:
    name = described["name"]
    if "dtype" not in described:
        raise ValueError(f"{kind} {name!r} is of type {described['type']}; {carry} tensors only")
    datatype = datatype_of(getattr(torch, described["dtype"]), f"{kind} {name!r}")
    shape = zip(described["sizes"], described["shape"], strict=True)
    return TensorSpec(name, datatype, tuple(size or number for size, number in shape))


def _reason_to_run_alone(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
    """Requests can be joined if the exported program itself says that one size is first everywhere, and nowhere else:
    export gives two dimensions one symbol only if they must be equal."""
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
