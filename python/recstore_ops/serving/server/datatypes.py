"""The protocol's types of elements, and torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Datatype:
    """A type of elements.

    Attributes:
        name: in the protocol.
        dtype: torch's.
        kind: what its elements are.
        contents: the field of a gRPC message that lists its elements; None: bytes only, in JSON too.
    """

    name: str
    dtype: torch.dtype
    kind: Literal["bool", "int", "float"]
    contents: str | None

    @property
    def size(self) -> int:
        """Bytes an element."""
        return self.dtype.itemsize


DATATYPES = (
    Datatype("BOOL", torch.bool, "bool", "bool_contents"),
    Datatype("UINT8", torch.uint8, "int", "uint_contents"),
    Datatype("UINT16", torch.uint16, "int", "uint_contents"),
    Datatype("UINT32", torch.uint32, "int", "uint_contents"),
    Datatype("UINT64", torch.uint64, "int", "uint64_contents"),
    Datatype("INT8", torch.int8, "int", "int_contents"),
    Datatype("INT16", torch.int16, "int", "int_contents"),
    Datatype("INT32", torch.int32, "int", "int_contents"),
    Datatype("INT64", torch.int64, "int", "int64_contents"),
    Datatype("FP16", torch.float16, "float", None),
    Datatype("BF16", torch.bfloat16, "float", None),
    Datatype("FP32", torch.float32, "float", "fp32_contents"),
    Datatype("FP64", torch.float64, "float", "fp64_contents"),
)

_BY_DTYPE = {each.dtype: each for each in DATATYPES}


def datatype_of(dtype: torch.dtype, place: str) -> Datatype:
    """Returns the protocol's type of a dtype.

    Raises:
        ValueError: there is none; the message names `place`.
    """
    if dtype not in _BY_DTYPE:
        raise ValueError(f"{place} has dtype {str(dtype).removeprefix('torch.')}, which the protocol does not know")
    return _BY_DTYPE[dtype]
