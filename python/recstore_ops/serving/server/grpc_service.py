"""The protocol over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from recstore_ops.serving.server.datatypes import DATATYPES
from recstore_ops.serving.server.http_messages import MAX_ENTRIES
from recstore_ops.serving.server.model_server import VERSION, InferRequest, ModelServer, Outputs
from recstore_ops.serving.server.refusals import Kind, Refusal, invalid, quoted
from recstore_ops.serving.server.requests import Answer, Request
from recstore_ops.serving.server.tensors import InputTensor, Listed, bytes_of

COMPILED = Path(__file__).with_name("open_inference.binpb")
SERVICE = "inference.GRPCInferenceService"


def _pool() -> descriptor_pool.DescriptorPool:
    # A pool of its own: a client in the same process may know the same names from another file.
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes())  # by path: the package's own
    for file in files.file:
        pool.Add(file)
    return pool


_POOL = _pool()
_CONTENTS = sorted({each.contents for each in DATATYPES if each.contents} | {"bytes_contents"})


def message_class(name: str) -> Any:
    """Returns the class of a message of the protocol."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


def read_infer_request(message: Any) -> tuple[InferRequest, bool]:
    """Reads a request, and whether its answer is to have raw contents: as asked, or as the request itself.

    Raises:
        Refusal: it is no request for inference.
    """
    for what in ("inputs", "outputs", "raw_input_contents"):
        if (count := len(getattr(message, what))) > MAX_ENTRIES:
            raise Refusal(Kind.TOO_LARGE, f"the request has {count} {what}, at most {MAX_ENTRIES} are taken")
    parameters = _parameters(message.parameters, "the request", ("binary_data_output",))
    raw = list(message.raw_input_contents)
    if raw and len(raw) != len(message.inputs):
        raise invalid(f"there are {len(message.inputs)} inputs and {len(raw)} raw_input_contents")
    inputs = [_input(each, raw[number] if raw else None) for number, each in enumerate(message.inputs)]
    for output in message.outputs:
        _parameters(output.parameters, f"output {quoted(output.name)}", ())
    names = [output.name for output in message.outputs]
    return InferRequest(message.id, inputs, names), parameters.get("binary_data_output", bool(raw))


def _input(message: Any, raw: bytes | None) -> InputTensor:
    place = f"input {quoted(message.name)}"
    _parameters(message.parameters, place, ())
    fields = tuple(name for name in _CONTENTS if getattr(message.contents, name))
    if raw is not None and fields:
        raise invalid(f"{place} has both contents and raw_input_contents")
    contents = Listed(fields, getattr(message.contents, fields[0]) if fields else ()) if raw is None else raw
    return InputTensor(message.name, message.datatype, tuple(message.shape), contents)


def _parameters(given: Mapping[str, Any], place: str, known: tuple[str, ...]) -> dict[str, bool]:
    found = {}
    for name, parameter in given.items():
        if name not in known:
            raise invalid(f"{place} has the parameter {quoted(name)}; known is {', '.join(known) or 'none'}")
        if parameter.WhichOneof("parameter_choice") != "bool_param":
            raise invalid(f"parameter {name} of {place} must be bool_param")
        found[name] = parameter.bool_param
    return found


def written_answer(name: str, request: InferRequest, is_raw: bool, outputs: Outputs) -> Any:
    """Returns the message of an answer. FP16 and BF16 have no lists: with one of them all contents are raw."""
    message = message_class("ModelInferResponse")(model_name=name, model_version=VERSION, id=request.id)
    is_raw = is_raw or any(spec.datatype.contents is None for spec, _ in outputs)
    for spec, tensor in outputs:
        entry = message.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=tensor.shape)
        if is_raw:
            message.raw_output_contents.append(bytes_of(tensor))
        else:
            assert spec.datatype.contents is not None
            getattr(entry.contents, spec.datatype.contents).extend(tensor.flatten().tolist())
    return message


class GrpcService:
    """Answers calls of gRPC whose token has been compared; their port answers health.

    Args:
        server: what is served.
    """

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._methods: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }

    async def answer(self, request: Request) -> Answer:
        """Answers a call."""
        try:
            if request.method == "ModelInfer":
                answer = await self._server.counted("grpc", lambda: self._answered(request))
            else:
                answer = await self._answered(request)
        except Refusal as refusal:
            return Answer(refusal.kind.code, str(refusal).encode())
        return Answer(0, answer.SerializeToString())

    async def _answered(self, request: Request) -> Any:
        message = message_class(f"{request.method}Request")
        try:
            read = message.FromString(request.content())
        except DecodeError as error:
            raise invalid(f"the message cannot be read: {error}") from None
        return await self._methods[request.method](read)

    async def _model_ready(self, request: Any) -> Any:
        self._server.check_model(request.name, request.version)
        return message_class("ModelReadyResponse")(ready=self._server.is_ready)

    async def _server_metadata(self, _: Any) -> Any:
        return message_class("ServerMetadataResponse")(**self._server.server_metadata)

    async def _model_metadata(self, request: Any) -> Any:
        self._server.check_model(request.name, request.version)
        return message_class("ModelMetadataResponse")(**self._server.model_metadata)

    async def _model_infer(self, message: Any) -> Any:
        self._server.check_model(message.model_name, message.model_version)
        request, is_raw = read_infer_request(message)
        outputs = await self._server.infer(request)
        return written_answer(self._server.name, request, is_raw, outputs)
