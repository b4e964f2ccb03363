"""Bodies of HTTP: JSON, and binary data behind it as Triton's extension says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recstore_ops.config.distinct_keys import distinct_keys
from recstore_ops.serving.server.model_server import VERSION, InferRequest, Outputs
from recstore_ops.serving.server.refusals import Kind, Refusal, invalid, quoted
from recstore_ops.serving.server.signature import TensorSpec
from recstore_ops.serving.server.tensors import InputTensor, bytes_of

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class HttpInferRequest:
    """A request for inference over HTTP.

    Attributes:
        request: what is asked.
        all_binary: whether outputs are binary data unless said otherwise.
        binary: outputs by name that say so themselves.
    """

    request: InferRequest
    all_binary: bool
    binary: Mapping[str, bool]


def read_infer_request(body: memoryview, header_length: str | None, name: str, most_elements: int) -> HttpInferRequest:
    """Reads a body, for the model of its path.

    Args:
        body: JSON, and binary data behind it.
        header_length: the bytes of the JSON, if the request says so.
        name: the model of the path.
        most_elements: of all inputs; JSON with more values is not parsed.

    Raises:
        Refusal: it is no request for inference.
    """
    split = len(body) if header_length is None else _header_length(header_length, len(body))
    document = _parsed(bytes(body[:split]), most_elements)
    _check_keys(document, "the request", ("id", "parameters", "inputs", "outputs", "model_name", "model_version"))
    for key, expected in (("model_name", name), ("model_version", VERSION)):
        if document.get(key) not in (None, expected):
            raise invalid(f"{key} is {quoted(document[key])}, the path is of {expected!r}")
    parameters = _parameters(document, "the request", {"binary_data_output": bool})
    inputs = _inputs(document, body[split:], has_binary=header_length is not None)
    outputs = _entries(document, "outputs", ("name", "parameters"))
    binary: dict[str, bool] = {}
    for output in outputs:
        own = _parameters(output, f"output {output['name']!r}", {"binary_data": bool})
        if own:
            binary[output["name"]] = own["binary_data"]
    request = InferRequest(_text(document, "id", "the request"), inputs, [output["name"] for output in outputs])
    return HttpInferRequest(request, parameters.get("binary_data_output", False), binary)


def written_answer(name: str, asked: HttpInferRequest, outputs: Outputs) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and how much of it is JSON if binary data follows."""
    binary: list[bytes] = []
    written = []
    for spec, tensor in outputs:
        entry = {"name": spec.name, "datatype": spec.datatype.name, "shape": list(tensor.shape)}
        if asked.binary.get(spec.name, asked.all_binary):
            binary.append(bytes_of(tensor))
            entry["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            entry["data"] = tensor.flatten().tolist()
        written.append(entry)
    document = {"model_name": name, "model_version": VERSION}
    if asked.request.id:
        document["id"] = asked.request.id
    header = json.dumps({**document, "outputs": written}, separators=(",", ":")).encode()
    return b"".join((header, *binary)), len(header) if binary else None


def check_asked(asked: HttpInferRequest, outputs: Iterable[TensorSpec]) -> None:
    """Looks at the wanted outputs before the program runs.

    Raises:
        Refusal: an output has no numbers in JSON.
    """
    for spec in outputs:
        is_wanted = not asked.request.outputs or spec.name in asked.request.outputs
        is_binary = asked.binary.get(spec.name, asked.all_binary)
        if is_wanted and not is_binary and spec.datatype.contents is None:
            raise invalid(f"output {spec.name!r} is {spec.datatype.name}: ask for it as binary data")


def _header_length(text: str, size: int) -> int:
    # In ASCII, since `isdigit` knows other digits too, and few, since `int` takes quadratic time for many.
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and 0 < int(text) <= size):
        raise invalid(f"{HEADER_LENGTH} must be from 1 to {size}, the bytes of the body, got {quoted(text)}")
    return int(text)


_MAX_DIGITS = 15


MAX_ENTRIES = 10_000
"""Objects of a request, and values beside the elements of its inputs."""


def _parsed(text: bytes, most_elements: int) -> dict[str, Any]:
    # A parsed object takes up to thirty times the bytes of its text: they are counted first, those in strings too.
    for what, found, most in (
        ("objects", text.count(b"{"), MAX_ENTRIES),
        ("lists", text.count(b"["), MAX_ENTRIES + most_elements),
        ("values", text.count(b","), MAX_ENTRIES + most_elements),
    ):
        if found > most:
            raise Refusal(Kind.TOO_LARGE, f"the JSON has more than {most} {what}, at most {most} are taken")
    try:
        document = json.loads(text, object_pairs_hook=distinct_keys(_twice))
    except RecursionError:
        raise invalid("the JSON is nested too deeply") from None
    except ValueError as error:
        raise invalid(f"the JSON cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise invalid(f"the JSON must be an object, got {quoted(document)}")
    return document


def _twice(name: str, _first: Any, _second: Any) -> Exception:
    return invalid(f"the JSON has the key {quoted(name)} twice")


def _check_keys(document: Mapping[str, Any], place: str, known: Sequence[str]) -> None:
    for key in document:
        if key not in known:
            raise invalid(f"{place} has the key {quoted(key)}; known are {', '.join(known)}")


def _inputs(document: Mapping[str, Any], binary: memoryview, *, has_binary: bool) -> list[InputTensor]:
    entries = _entries(document, "inputs", ("name", "shape", "datatype", "parameters", "data"))
    given = []
    begin = 0
    for entry in entries:
        place = f"input {entry['name']!r}"
        size = _parameters(entry, place, {"binary_data_size": int}).get("binary_data_size")
        if (size is None) == (entry.get("data") is None):
            raise invalid(f"{place} needs either data or binary_data_size")
        if size is None:
            contents = _list(entry, "data", place)
        else:
            contents = _binary(binary, begin, size, place, has_binary=has_binary)
            begin += size
        given.append(InputTensor(entry["name"], _text(entry, "datatype", place), _shape(entry, place), contents))
    if begin != len(binary):
        raise invalid(f"the body has {len(binary)} bytes behind the JSON, its inputs name {begin}")
    return given


def _binary(binary: memoryview, begin: int, size: int, place: str, *, has_binary: bool) -> memoryview:
    if not has_binary:
        raise invalid(f"{place} has binary_data_size, and there is no {HEADER_LENGTH}")
    if not 0 <= size <= len(binary) - begin:
        raise invalid(f"{place} has binary_data_size {size}, and {len(binary) - begin} bytes are left")
    return binary[begin : begin + size]


def _entries(document: Mapping[str, Any], key: str, known: Sequence[str]) -> list[dict[str, Any]]:
    entries = _list(document, key, "the request")
    for entry in entries:
        if not isinstance(entry, dict):
            raise invalid(f"{key} has objects, got {quoted(entry)}")
        if not isinstance(entry.get("name"), str):
            raise invalid(f"an entry of {key} has no name")
        _check_keys(entry, f"{key[:-1]} {quoted(entry['name'])}", known)
    return entries


def _list(document: Mapping[str, Any], key: str, place: str) -> list[Any]:
    value = document.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"{key} of {place} must be a list, got {quoted(value)}")
    return value


def _text(document: Mapping[str, Any], key: str, place: str) -> str:
    value = document.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(f"{key} of {place} must be a string, got {quoted(value)}")
    return value


def _shape(entry: Mapping[str, Any], place: str) -> list[int]:
    shape = _list(entry, "shape", place)
    if any(type(size) is not int for size in shape):
        raise invalid(f"shape of {place} must be integers, got {quoted(shape)}")
    return shape


def _parameters(document: Mapping[str, Any], place: str, known: Mapping[str, type]) -> dict[str, Any]:
    value = document.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"parameters of {place} must be an object, got {quoted(value)}")
    for name, parameter in value.items():
        if name not in known:
            raise invalid(f"{place} has the parameter {quoted(name)}; known is {', '.join(known)}")
        # Not isinstance: true would pass for a number of bytes, for bool is a subclass of int.
        if type(parameter) is not known[name]:
            raise invalid(f"parameter {name} of {place} must be {known[name].__name__}, got {quoted(parameter)}")
    return value


def written_error(refusal: Refusal) -> bytes:
    """Returns the body of a refusal."""
    return json.dumps({"error": str(refusal)}).encode()
