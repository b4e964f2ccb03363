"""`recstore serve-model` given requests that are wrong: each is refused by a status, a code and a sentence."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from served_models import ServedModel, bags, binary_body, bytes_of, call, call_with, mixed, pairs, pairs_body

from recstore_ops.serving.server.grpc_service import message_class

pytestmark = pytest.mark.tier("test")

IDS = torch.tensor([[1, 2], [3, 4]])
ENTRY = {"name": "ids", "datatype": "INT64", "shape": [2, 2], "data": [[1, 2], [3, 4]]}
INFER = "/v2/models/pairs/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """A server of `Pairs` with small limits."""
    bundle = pairs(tmp_path_factory.mktemp("bundles") / "pairs", "serve_model_refusals")
    options = ("--grpc-port", 0, "--max-body", 100_000, "--max-elements", 5_000, "--max-pending-bytes", 400_000)
    with ServedModel(bundle, *options) as server:
        yield server


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """A server of `Mixed`."""
    with ServedModel(mixed(tmp_path_factory.mktemp("bundles") / "mixed"), "--grpc-port", 0) as server:
        yield server


@pytest.fixture(autouse=True)
def _all_is_well_afterwards(server: ServedModel) -> Iterator[None]:
    yield
    assert server.send(INFER, pairs_body(IDS)).status == 200


@pytest.mark.parametrize(
    ("path", "method", "status", "message"),
    [
        ("/", "GET", 404, "there is no path '/'"),
        ("/v1/models/pairs", "GET", 404, "there is no path '/v1/models/pairs'"),
        ("/v2/models", "GET", 404, "there is no path '/v2/models'"),
        ("/v2/models/pairs/versions", "GET", 404, "there is no path '/v2/models/pairs/versions'"),
        ("/v2/models/pairs/load", "POST", 404, "there is no path '/v2/models/pairs/load'"),
        ("/v2/health/started", "GET", 404, "there is no path '/v2/health/started'"),
        ("/v2/models/cars", "GET", 404, "there is no model 'cars', there is 'pairs'"),
        ("/v2/models/cars/ready", "GET", 404, "there is no model 'cars', there is 'pairs'"),
        ("/v2/models/cars/infer", "POST", 404, "there is no model 'cars', there is 'pairs'"),
        ("/v2/models/pairs/versions/2/infer", "POST", 404, "model 'pairs' has no version '2', it has '1'"),
        ("/v2", "POST", 405, "/v2 takes GET, got 'POST'"),
        ("/v2/health/live", "DELETE", 405, "/v2/health/live takes GET, got 'DELETE'"),
        ("/metrics", "PUT", 405, "/metrics takes GET, got 'PUT'"),
        ("/v2/models/a%0D%0A%20takes%20b,/infer", "GET", 405, "/v2/models/a\r\n takes b,/infer takes POST, got 'GET'"),
        (INFER, "GET", 405, f"{INFER} takes POST, got 'GET'"),
    ],
)
def test_paths_and_methods(server: ServedModel, path: str, method: str, status: int, message: str) -> None:
    refused = server.send(path, method=method)
    assert (refused.status, refused.error) == (status, message)
    if status == 405:
        assert refused.headers["Allow"] == ("POST" if path.endswith("infer") else "GET")


def changed(**changes: Any) -> dict[str, Any]:
    """A request whose input is changed."""
    entry = {**ENTRY, **changes}
    return {"inputs": [{key: value for key, value in entry.items() if value is not ...}]}


WRONG_INPUTS = [
    ({"inputs": []}, "input 'ids' is missing"),
    ({}, "input 'ids' is missing"),
    ({"inputs": [ENTRY, ENTRY]}, "input 'ids' is given twice"),
    ({"inputs": [ENTRY, {**ENTRY, "name": "user"}]}, "there is no input 'user'; the model takes ids"),
    (changed(datatype="INT32"), "input 'ids' is INT64, got 'INT32'"),
    (changed(datatype=...), "input 'ids' is INT64, got ''"),
    (changed(shape=[4]), "input 'ids' has 2 dimensions, got shape [4]"),
    (changed(shape=...), "input 'ids' has 2 dimensions, got shape []"),
    (changed(shape=[2, 3]), "input 'ids' has shape [-1, 2], got [2, 3]"),
    (changed(shape=[-1, 2]), "input 'ids' has shape [-1, 2]: no size is negative"),
    (changed(shape=[2**60, 2]), f"the inputs have {2**61} elements, at most 5000 are taken"),
    (changed(shape=[3, 2]), "the lists of input 'ids' are not nested as its shape [3, 2] says"),
    (changed(data=[[1, 2, 3], [4]]), "the lists of input 'ids' are not nested as its shape [2, 2] says"),
    (changed(data=[[1, 2], 3]), "the lists of input 'ids' are not nested as its shape [2, 2] says"),
    (changed(data=[1, 2, 3]), "input 'ids' takes 4 elements, got 3"),
    (changed(data=[[1, 2], [3, 4.0]]), "input 'ids' is INT64, got 4.0"),
    (changed(data=[[1, 2], [3, True]]), "input 'ids' is INT64, got True"),
    (changed(data=[[1, 2], [3, "4"]]), "input 'ids' is INT64, got '4'"),
    (changed(data=[[1, 2], [3, None]]), "input 'ids' is INT64, got None"),
    (changed(data=[[1, 2], [3, [4]]]), "input 'ids' is INT64, got [4]"),
    (changed(data=[1, 2, 3, [4]]), "input 'ids' is INT64, got [4]"),
    (changed(data=[1, 2, 3, 2**63]), f"input 'ids' is INT64, from {-(2**63)} to {2**63 - 1}, got {2**63}"),
    (changed(data={"a": 1}), "data of input 'ids' must be a list, got {'a': 1}"),
    (changed(data=...), "input 'ids' needs either data or binary_data_size"),
    (changed(parameters={"binary_data_size": 4}), "input 'ids' needs either data or binary_data_size"),
    (changed(shape="2, 2"), "shape of input 'ids' must be a list, got '2, 2'"),
    (changed(shape=[2.0, 2]), "shape of input 'ids' must be integers, got [2.0, 2]"),
    (changed(datatype=3), "datatype of input 'ids' must be a string, got 3"),
    (changed(name=...), "an entry of inputs has no name"),
    (changed(offset=1), "input 'ids' has the key 'offset'; known are name, shape, datatype, parameters, data"),
    (changed(parameters=[]), "parameters of input 'ids' must be an object, got []"),
    (changed(parameters={"scale": 1}), "input 'ids' has the parameter 'scale'; known is binary_data_size"),
    (
        changed(data=..., parameters={"binary_data_size": "32"}),
        "parameter binary_data_size of input 'ids' must be int, got '32'",
    ),
    (
        changed(data=..., parameters={"binary_data_size": 32}),
        "input 'ids' has binary_data_size, and there is no Inference-Header-Content-Length",
    ),
    ({"inputs": {"ids": ENTRY}}, "inputs of the request must be a list"),
    ({"inputs": [3]}, "inputs has objects, got 3"),
    ({"inputs": [ENTRY], "outputs": [{"name": "score"}]}, "there is no output 'score'; the model gives output"),
    ({"inputs": [ENTRY], "outputs": [{"name": "output"}] * 2}, "output 'output' is asked for twice"),
    ({"inputs": [ENTRY], "outputs": [{}]}, "an entry of outputs has no name"),
    (
        {"inputs": [ENTRY], "outputs": [{"name": "output", "parameters": {"classification": 2}}]},
        "output 'output' has the parameter 'classification'; known is binary_data",
    ),
    (
        {"inputs": [ENTRY], "outputs": [{"name": "output", "parameters": {"binary_data": 1}}]},
        "parameter binary_data of output 'output' must be bool, got 1",
    ),
    ({"inputs": [ENTRY], "parameters": {"priority": 1}}, "the request has the parameter 'priority'; known is"),
    ({"inputs": [ENTRY], "id": 7}, "id of the request must be a string, got 7"),
    ({"inputs": [ENTRY], "input": []}, "the request has the key 'input'; known are id, parameters, inputs, outputs"),
    ({"inputs": [ENTRY], "model_name": "cars"}, "model_name is 'cars', the path is of 'pairs'"),
    ({"inputs": [ENTRY], "model_version": "2"}, "model_version is '2', the path is of '1'"),
]


@pytest.mark.parametrize(("document", "message"), WRONG_INPUTS)
def test_requests_of_json(server: ServedModel, document: dict[str, Any], message: str) -> None:
    refused = server.send(INFER, json.dumps(document).encode())
    assert refused.error[: len(message)] == message
    assert refused.status == (413 if "at most" in message else 400)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the JSON cannot be read: Expecting value"),
        (b"{", "the JSON cannot be read: Expecting property name"),
        (b"\xff\xfe{}", "the JSON cannot be read: "),
        (b"[1, 2]", "the JSON must be an object, got [1, 2]"),
        (b'{"id": "a", "id": "b"}', "the JSON has the key 'id' twice"),
        (b'{"inputs": ' + b"[" * 14_000, "the JSON is nested too deeply"),
        (b'{"a":' * 9_000, "the JSON is nested too deeply"),
        (
            b'{"inputs": [{"name": "ids", "data": [' + b"9" * 5_000 + b"]}]}",
            "the JSON cannot be read: Exceeds the limit",
        ),
        (b'{"%s": 1}' % (b"k" * 90_000), "the request has the key 'kkkk"),
    ],
)
def test_bodies_that_are_no_json(server: ServedModel, body: bytes, message: str) -> None:
    refused = server.send(INFER, body)
    assert refused.status == 400
    assert refused.error.startswith(message), refused.error[:200]
    assert len(refused.error) < 300


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("0", "Inference-Header-Content-Length must be from 1 to "),
        ("-5", "Inference-Header-Content-Length must be from 1 to "),
        ("many", "Inference-Header-Content-Length must be from 1 to "),
        ("9" * 30, "Inference-Header-Content-Length must be from 1 to "),
        ("10", "the JSON cannot be read: "),
    ],
)
def test_lengths_of_the_header(server: ServedModel, length: str, message: str) -> None:
    body, _ = binary_body(("ids", "INT64", IDS))
    refused = server.send(INFER, body, {"Inference-Header-Content-Length": length})
    assert (refused.status, refused.error[: len(message)]) == (400, message)


@pytest.mark.parametrize(
    ("size", "sent", "message"),
    [
        (32, 31, "input 'ids' has binary_data_size 32, and 31 bytes are left"),
        (32, 33, "the body has 33 bytes behind the JSON, its inputs name 32"),
        (-1, 32, "input 'ids' has binary_data_size -1, and 32 bytes are left"),
        (24, 24, "input 'ids' takes 32 bytes of data, got 24"),
        (10**15, 32, "input 'ids' has binary_data_size 1000000000000000, and 32 bytes are left"),
    ],
)
def test_sizes_of_binary_data(server: ServedModel, size: int, sent: int, message: str) -> None:
    entry = {**ENTRY, "parameters": {"binary_data_size": size}}
    del entry["data"]
    header = json.dumps({"inputs": [entry]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    refused = server.send(INFER, header + bytes(sent), headers)
    assert (refused.status, refused.error) == (400, message)


def mixed_body(**changes: Any) -> bytes:
    """A request for `Mixed` in JSON, with other elements of some inputs."""
    given = {"ids": [1, 2], "floats": [1, 2, 3], "flags": [True], "small": [1], "bytes": [1], **changes}
    types = {"ids": "INT64", "floats": "FP32", "flags": "BOOL", "small": "INT8", "bytes": "UINT8"}
    shapes = {"ids": [1, 2], "floats": [1, 3]}
    inputs = [
        {"name": name, "datatype": types[name], "shape": shapes.get(name, [1]), "data": data}
        for name, data in given.items()
    ]
    return json.dumps({"inputs": inputs, "outputs": [{"name": "sum"}]}).encode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"small": [128]}, "input 'small' is INT8, from -128 to 127, got 128"),
        ({"small": [-129]}, "input 'small' is INT8, from -128 to 127, got -129"),
        ({"bytes": [-1]}, "input 'bytes' is UINT8, from 0 to 255, got -1"),
        ({"flags": [1]}, "input 'flags' is BOOL, got 1"),
        ({"floats": [1, 2, "3"]}, "input 'floats' is FP32, got '3'"),
        ({"floats": [1, 2, 1e39]}, "input 'floats' is FP32, which has no number as large as 1e+39"),
        ({"floats": [1, 2, 10**400]}, "input 'floats' is FP32, and a number is too large for it"),
    ],
)
def test_elements_of_other_types(other: ServedModel, changes: dict[str, Any], message: str) -> None:
    assert other.send("/v2/models/mixed/infer", mixed_body()).status == 200
    refused = other.send("/v2/models/mixed/infer", mixed_body(**changes))
    assert (refused.status, refused.error) == (400, message)


def test_inputs_of_different_batches(other: ServedModel) -> None:
    document = json.loads(mixed_body())
    document["inputs"][1] |= {"shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}
    refused = other.send("/v2/models/mixed/infer", json.dumps(document).encode())
    assert refused.error == "input 'floats' has a dimension of 2 that must be 1, as that of 'ids'"


def test_bytes_that_are_no_truth_values(other: ServedModel) -> None:
    document = json.loads(mixed_body())
    flags = document["inputs"][2]
    del flags["data"]
    flags["parameters"] = {"binary_data_size": 1}
    header = json.dumps(document).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    refused = other.send("/v2/models/mixed/infer", header + b"\x02", headers)
    assert refused.error == "input 'flags' is BOOL: a byte is 0 or 1, got 2"


def test_bodies_that_are_too_large_or_packed(server: ServedModel) -> None:
    refused = server.send(INFER, bytes(100_001))
    assert (refused.status, refused.error) == (413, "the body has 100001 bytes, at most 100000 are taken")
    taken = server.send(INFER, b"{}", {"Content-Encoding": "identity"})
    assert (taken.status, taken.error) == (400, "input 'ids' is missing")
    refused = server.send(INFER, b"{}", {"Content-Encoding": "gzip"})
    assert (refused.status, refused.error) == (415, "bodies are taken as they are, not in Content-Encoding 'gzip'")
    connection = server.connection()
    connection.request("POST", INFER, iter([bytes(50_000)] * 3), encode_chunked=True)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]) == (
        413,
        "the body has more than 100000 bytes, at most 100000 are taken",
    )
    connection.close()


def test_bodies_in_chunks_and_after_a_question(server: ServedModel) -> None:
    connection = server.connection()
    body = pairs_body(IDS)
    connection.request("POST", INFER, iter([body[:7], body[7:]]), encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()
    with asking_first(server, len(body)) as asking:
        assert asking.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        asking.sendall(body)
        assert asking.recv(100).startswith(b"HTTP/1.1 200")
    with asking_first(server, 100_001) as asking:
        assert asking.recv(100).startswith(b"HTTP/1.1 413"), "before any of it is sent"


def asking_first(server: ServedModel, length: int) -> socket.socket:
    """A connection that has sent the head of a request."""
    host, port = server.addresses["http"].split(":")
    asking = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
    asking.sendall(head.encode())
    return asking


def test_requests_take_memory_as_they_come(server: ServedModel) -> None:
    waiting = [asking_first(server, 99_000) for _ in range(20)]
    for each in waiting:
        assert each.recv(100).startswith(b"HTTP/1.1 100")
    assert server.send(INFER, bytes(90_000)).status == 400, "what they announce takes no room"
    refused = server.send(INFER, bytes(90_000))
    for each in waiting:
        each.sendall(bytes(98_000))
        refused = server.send(INFER, bytes(90_000))
        if refused.status == 503:
            break
    assert refused.headers["Retry-After"] == "1"
    assert refused.error == "the requests under way take all memory for requests: try again later"
    assert server.send(INFER, pairs_body(IDS)).status == 200, "there is room for a small one"
    for each in waiting:
        each.close()
    deadline = time.monotonic() + 20
    while server.send(INFER, bytes(90_000)).status == 503:
        assert time.monotonic() < deadline


def refusal(channel: grpc.Channel, method: str = "ModelInfer", **fields: Any) -> tuple[str, str]:
    """The code and the message of a call that is refused."""
    with pytest.raises(grpc.RpcError) as error:
        call(channel, method, **fields)
    return error.value.code().name, error.value.details()  # type: ignore[attr-defined]


CALLED = {"name": "ids", "datatype": "INT64", "shape": [2, 2], "contents": {"int64_contents": [1, 2, 3, 4]}}
RAW = {key: value for key, value in CALLED.items() if key != "contents"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "input 'ids' is missing"),
        ({"inputs": [CALLED, CALLED]}, "input 'ids' is given twice"),
        ({"inputs": [{**CALLED, "name": "x" * 1000}]}, "there is no input 'xxxx"),
        ({"inputs": [{**CALLED, "datatype": "INT32"}]}, "input 'ids' is INT64, got 'INT32'"),
        ({"inputs": [{**CALLED, "shape": [3, 2]}]}, "input 'ids' takes 6 elements, got 4"),
        ({"inputs": [RAW]}, "input 'ids' takes 4 elements, got 0"),
        (
            {"inputs": [{**CALLED, "contents": {"int_contents": [1, 2, 3, 4]}}]},
            "input 'ids' is INT64, which goes in int64_contents, got int_contents",
        ),
        (
            {"inputs": [{**CALLED, "contents": {"int64_contents": [1, 2, 3, 4], "bytes_contents": [b"a"]}}]},
            "input 'ids' is INT64, which goes in int64_contents, got bytes_contents",
        ),
        (
            {"inputs": [CALLED], "raw_input_contents": [bytes(32)]},
            "input 'ids' has both contents and raw_input_contents",
        ),
        ({"inputs": [RAW], "raw_input_contents": [bytes(31)]}, "input 'ids' takes 32 bytes of data, got 31"),
        (
            {"inputs": [RAW], "raw_input_contents": [bytes(32), b""]},
            "there are 1 inputs and 2 raw_input_contents",
        ),
        (
            {"inputs": [CALLED], "parameters": {"priority": {"int64_param": 1}}},
            "the request has the parameter 'priority'; known is binary_data_output",
        ),
        (
            {"inputs": [CALLED], "parameters": {"binary_data_output": {"string_param": "yes"}}},
            "parameter binary_data_output of the request must be bool_param",
        ),
        (
            {"inputs": [{**CALLED, "parameters": {"a": {"bool_param": True}}}]},
            "input 'ids' has the parameter 'a'; known is none",
        ),
        (
            {"inputs": [CALLED], "outputs": [{"name": "output", "parameters": {"a": {"bool_param": True}}}]},
            "output 'output' has the parameter 'a'; known is none",
        ),
        ({"inputs": [CALLED], "outputs": [{"name": "score"}]}, "there is no output 'score'"),
    ],
)
def test_requests_of_grpc(server: ServedModel, fields: dict[str, Any], message: str) -> None:
    with server.channel() as channel:
        code, said = refusal(channel, model_name="pairs", **fields)
        assert (code, said[: len(message)]) == ("INVALID_ARGUMENT", message)
        assert call(channel, "ModelInfer", model_name="pairs", inputs=[CALLED]).outputs


def test_elements_of_grpc_that_are_out_of_range(other: ServedModel) -> None:
    document = json.loads(mixed_body(small=[128]))
    names = {"INT64": "int64", "FP32": "fp32", "BOOL": "bool", "INT8": "int", "UINT8": "uint"}
    inputs = document["inputs"]
    for each in inputs:
        each["contents"] = {f"{names[each['datatype']]}_contents": each.pop("data")}
    with other.channel() as channel:
        code, said = refusal(channel, model_name="mixed", inputs=inputs)
    assert (code, said) == ("INVALID_ARGUMENT", "input 'small' is INT8, from -128 to 127, got 128")


def test_models_methods_and_messages_that_are_none(server: ServedModel) -> None:
    with server.channel() as channel:
        unknown = ("NOT_FOUND", "there is no model 'cars', there is 'pairs'")
        assert refusal(channel, model_name="cars", inputs=[CALLED]) == unknown
        assert refusal(channel, "ModelReady", name="cars") == unknown
        assert refusal(channel, "ModelMetadata", name="cars") == unknown
        version = ("NOT_FOUND", "model 'pairs' has no version '3', it has '1'")
        assert refusal(channel, model_name="pairs", model_version="3") == version
        for damaged in (b"\xff" * 50, message_class("ModelInferRequest")(model_name="pairs").SerializeToString()[:-1]):
            with pytest.raises(grpc.RpcError, match="the message cannot be read: ") as error:
                call_with(channel, "ModelInfer", damaged)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError) as error:
            call_with(channel, "ModelInfer", bytes(100_001))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        packed = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as error:
            packed(bytes(50_000_000), timeout=10, compression=grpc.Compression.Gzip)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
        assert error.value.details() == "messages are taken as they are, not compressed"  # type: ignore[attr-defined]
        for method in ("ServerLive", "ModelMetadata"):
            nothing = channel.stream_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError, match="the call has no message"):
                nothing(iter(()), timeout=10)
            with pytest.raises(grpc.RpcError, match="the call has more than one message"):
                nothing(iter((b"", b"")), timeout=10)
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")(b"", timeout=10)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_what_the_model_refuses_is_the_clients_fault(tmp_path: Path) -> None:
    with ServedModel(bags(tmp_path / "bags", "serve_model_refusals/bags"), "--grpc-port", 0) as server:
        body, headers = binary_body(("input", "INT64", torch.arange(4)), ("offsets", "INT64", torch.tensor([1, 2])))
        refused = server.send("/v2/models/bags/infer", body, headers)
        message = "the model refuses the inputs: emb_bag: offsets must start at 0, got 1"
        assert (refused.status, refused.error) == (400, message)
        raw = [bytes_of(torch.arange(4)), bytes_of(torch.tensor([1, 2]))]
        inputs = [{"name": name, "datatype": "INT64", "shape": [size]} for name, size in (("input", 4), ("offsets", 2))]
        with server.channel() as channel:
            found = refusal(channel, model_name="bags", inputs=inputs, raw_input_contents=raw)
        assert found == ("INVALID_ARGUMENT", message)


def test_damaged_tables_are_the_servers_fault(tmp_path: Path) -> None:
    bundle = pairs(tmp_path / "pairs", "serve_model_refusals/damaged", rows=20_000)
    table = bundle / "tables" / "0.safetensors"
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    with ServedModel(bundle) as server:
        refused = server.send("/v2/models/pairs/infer", pairs_body(torch.arange(20_000).reshape(-1, 2)))
        assert refused.status == 500
        assert refused.error.startswith(f"the model failed: frozen table: {table}: bytes ")
        assert server.metric('outcome="failed"') == 1
        pair = range(100)
        statuses = {server.send("/v2/models/pairs/infer", pairs_body(torch.tensor([[id, id]]))).status for id in pair}
        assert 200 in statuses, "other rows are in order"
