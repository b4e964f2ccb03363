"""Tensors of a request: every input is compared with what the bundle takes before any memory is made for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recstore_ops.serving.server.refusals import Kind, Refusal, invalid, quoted
from recstore_ops.serving.server.signature import Signature, TensorSpec


@dataclass(frozen=True)
class Listed:
    """Elements as a list of a gRPC message.

    Attributes:
        fields: the names of all lists that have elements.
        elements: those of the list of the input's type.
    """

    fields: tuple[str, ...]
    elements: Any


@dataclass(frozen=True)
class InputTensor:
    """An input as a request has it.

    Attributes:
        name, datatype, shape: as written.
        contents: bytes, nested lists of JSON, or lists of gRPC.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    contents: bytes | memoryview | list[Any] | Listed


def tensors_of(signature: Signature, given: Sequence[InputTensor], most_elements: int) -> list[Tensor]:
    """Returns the tensors of a request in the order of the program's arguments.

    Raises:
        Refusal: an input is missing, unknown, given twice or not what the bundle takes, or there are too many elements.
    """
    by_name = _by_name(signature, given)
    sizes: dict[str, tuple[int, str]] = {}
    elements = 0
    for spec in signature.inputs:
        _check(spec, by_name[spec.name], sizes)
        elements += math.prod(by_name[spec.name].shape)
    # Summed over all inputs, before memory is made for the first.
    if elements > most_elements:
        raise Refusal(Kind.TOO_LARGE, f"the inputs have {elements} elements, at most {most_elements} are taken")
    return [_tensor(spec, by_name[spec.name]) for spec in signature.inputs]


def _by_name(signature: Signature, given: Sequence[InputTensor]) -> dict[str, InputTensor]:
    names = [spec.name for spec in signature.inputs]
    by_name: dict[str, InputTensor] = {}
    for each in given:
        if each.name not in names:
            raise invalid(f"there is no input {quoted(each.name)}; the model takes {', '.join(names)}")
        if each.name in by_name:
            raise invalid(f"input {each.name!r} is given twice")
        by_name[each.name] = each
    for name in names:
        if name not in by_name:
            raise invalid(f"input {name!r} is missing")
    return by_name


def _check(spec: TensorSpec, given: InputTensor, sizes: dict[str, tuple[int, str]]) -> None:
    """Compares type and shape; `sizes` has those of dimensions that vary, by their texts, and who said so."""
    name = spec.name
    if given.datatype != spec.datatype.name:
        raise invalid(f"input {name!r} is {spec.datatype.name}, got {quoted(given.datatype)}")
    shape = list(given.shape)
    if len(shape) != len(spec.shape):
        raise invalid(f"input {name!r} has {len(spec.shape)} dimensions, got shape {quoted(shape)}")
    for size, expected in zip(shape, spec.shape, strict=True):
        if size < 0:
            raise invalid(f"input {name!r} has shape {quoted(shape)}: no size is negative")
        if isinstance(expected, int):
            if size != expected:
                raise invalid(f"input {name!r} has shape {spec.public_shape}, got {quoted(shape)}")
            continue
        before, by = sizes.setdefault(expected, (size, name))
        if size != before:
            raise invalid(f"input {name!r} has a dimension of {size} that must be {before}, as that of {by!r}")


def _tensor(spec: TensorSpec, given: InputTensor) -> Tensor:
    if isinstance(given.contents, Listed):
        flat = _of_listed(spec, given.contents, math.prod(given.shape))
    elif isinstance(given.contents, list):
        flat = _of_json(spec, given.contents, list(given.shape))
    else:
        flat = _of_bytes(spec, given.contents, math.prod(given.shape))
    return flat.reshape(tuple(given.shape))


def _of_bytes(spec: TensorSpec, contents: bytes | memoryview, count: int) -> Tensor:
    size = spec.datatype.size
    if len(contents) != count * size:
        raise invalid(f"input {spec.name!r} takes {count * size} bytes of data, got {len(contents)}")
    if not count:
        return torch.empty(0, dtype=spec.datatype.dtype, device="cpu")
    given = np.frombuffer(contents, np.uint8)
    if spec.datatype.kind == "bool" and given.max() > 1:
        raise invalid(f"input {spec.name!r} is BOOL: a byte is 0 or 1, got {given.max()}")
    # A copy lies as torch's own tensors do: a product of matrices that lie otherwise can have other bits.
    tensor = torch.empty(count, dtype=spec.datatype.dtype, device="cpu")
    tensor.view(torch.uint8).numpy()[:] = given
    return tensor


def _of_listed(spec: TensorSpec, contents: Listed, count: int) -> Tensor:
    field = spec.datatype.contents
    if field is None:
        raise invalid(f"input {spec.name!r} is {spec.datatype.name}, which goes in raw_input_contents only")
    for other in contents.fields:
        if other != field:
            raise invalid(f"input {spec.name!r} is {spec.datatype.name}, which goes in {field}, got {other}")
    if len(contents.elements) != count:
        raise invalid(f"input {spec.name!r} takes {count} elements, got {len(contents.elements)}")
    return _of_elements(spec, contents.elements)


_TYPES = {"bool": {bool}, "int": {int}, "float": {int, float}}


def _of_json(spec: TensorSpec, data: list[Any], shape: list[int]) -> Tensor:
    if spec.datatype.contents is None:
        raise invalid(f"input {spec.name!r} is {spec.datatype.name}, which goes as binary data only")
    flat = _flat(spec, data, shape)
    types = set(map(type, flat))
    if wrong := types - _TYPES[spec.datatype.kind]:
        found = next(each for each in flat if type(each) in wrong)
        raise invalid(f"input {spec.name!r} is {spec.datatype.name}, got {quoted(found)}")
    return _of_elements(spec, flat)


def _flat(spec: TensorSpec, data: list[Any], shape: list[int]) -> list[Any]:
    """Returns elements in the order of rows; lists are nested as the shape says, or not at all."""
    count = math.prod(shape)
    if len(shape) < 2 or not data or type(data[0]) is not list:
        if len(data) != count:
            raise invalid(f"input {spec.name!r} takes {count} elements, got {len(data)}")
        return data
    for depth, following in enumerate(shape[1:]):
        is_whole = len(data) == math.prod(shape[: depth + 1])
        if not is_whole or any(type(each) is not list or len(each) != following for each in data):
            raise invalid(f"the lists of input {spec.name!r} are not nested as its shape {shape} says")
        data = [element for each in data for element in each]
    return data


def _of_elements(spec: TensorSpec, elements: Sequence[Any]) -> Tensor:
    kind = spec.datatype.kind
    if kind == "int":
        return _integers(spec, elements)
    if kind == "bool":
        return torch.tensor(np.array(elements, dtype=np.bool_), dtype=torch.bool, device="cpu")
    wide = torch.from_numpy(_doubles(spec, elements))
    narrow = wide.to(spec.datatype.dtype)
    if bool((narrow.isinf() & ~wide.isinf()).any()):
        found = wide[narrow.isinf() & ~wide.isinf()][0].item()
        raise invalid(f"input {spec.name!r} is {spec.datatype.name}, which has no number as large as {found:g}")
    return narrow


def _doubles(spec: TensorSpec, elements: Sequence[Any]) -> np.ndarray[Any, Any]:
    try:
        return np.array(elements, dtype=np.float64)
    except OverflowError:  # An integer of hundreds of digits.
        raise invalid(f"input {spec.name!r} is {spec.datatype.name}, and a number is too large for it") from None


def _integers(spec: TensorSpec, elements: Sequence[Any]) -> Tensor:
    bounds = torch.iinfo(spec.datatype.dtype)
    if len(elements):
        for extreme in (min(elements), max(elements)):
            if not bounds.min <= extreme <= bounds.max:
                raise invalid(
                    f"input {spec.name!r} is {spec.datatype.name}, from {bounds.min} to {bounds.max}, "
                    f"got {quoted(extreme)}"
                )
    return torch.from_numpy(np.array(elements, dtype=str(spec.datatype.dtype).removeprefix("torch.")))


def bytes_of(tensor: Tensor) -> bytes:
    """Returns the elements of a tensor in the order of rows, as the protocol's binary data."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
