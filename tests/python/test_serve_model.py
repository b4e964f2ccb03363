"""`recstore serve-model` over HTTP and gRPC: what it says of itself, and answers that equal the bundle's to the bit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from eventually import wait_until
from google.protobuf import descriptor_pb2
from served_models import (
    DTYPES,
    MIXED,
    Halves,
    ServedModel,
    bags,
    binary_body,
    bytes_of,
    call,
    infer_body,
    mixed,
    pairs,
    pairs_body,
    tensors_of,
)
from torch import Tensor, nn
from warm_recstore import run_recstore

from recstore_ops.serving import export, load_bundle
from recstore_ops.serving.server.grpc_service import COMPILED

pytestmark = pytest.mark.tier("test")

IDS = torch.tensor([[1, 2], [3, 4], [5, 99], [1000, -7]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles."""
    folder = tmp_path_factory.mktemp("bundles")
    pairs(folder / "pairs", "serve_model")
    mixed(folder / "mixed")
    bags(folder / "bags", "serve_model/bags")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[dict[str, ServedModel]]:
    """A server for each bundle."""
    with (
        ServedModel(folder / "pairs", "--grpc-port", 0, "--health-port", 0, "--metrics-port", 0) as of_pairs,
        ServedModel(folder / "mixed", "--grpc-port", 0, "--name", "all types") as of_mixed,
        ServedModel(folder / "bags", "--grpc-port", 0) as of_bags,
    ):
        yield {"pairs": of_pairs, "mixed": of_mixed, "bags": of_bags}


def mixed_inputs(names: Any = MIXED) -> list[tuple[str, str, Tensor]]:
    return [(name, *MIXED[name]) for name in names]


def mixed_outputs(folder: Path) -> dict[str, Tensor]:
    return load_bundle(folder / "mixed")(*(tensor for _, tensor in MIXED.values()))


def test_the_start_says_all_in_one_line(served: dict[str, ServedModel]) -> None:
    address = served["pairs"].addresses
    assert served["pairs"].line == (
        f'model "pairs" at http://{address["http"]}, gRPC at {address["grpc"]}, '
        f"health at http://{address['health']}/v2/health/ready, metrics at http://{address['metrics']}/metrics; "
        "tables serve_model/user (float32, 100 rows of 4), serve_model/item (float32, 100 rows of 4); "
        "inputs ids INT64 [-1, 2]; outputs output FP32 [-1]; requests are joined up to 128 rows\n"
    )
    assert "; tables none; inputs ids INT64 [-1, 2], floats FP32 [-1, 3], flags BOOL [-1]" in served["mixed"].line
    assert served["bags"].line.endswith(
        "; every request runs alone: the first dimensions of input and offsets vary on their own\n"
    )


def test_the_server_and_its_model_are_described(served: dict[str, ServedModel]) -> None:
    server = served["pairs"]
    described = server.send("/v2").document
    assert (described["name"], described["extensions"]) == ("recstore", ["binary_tensor_data"])
    model = {
        "name": "pairs",
        "versions": ["1"],
        "platform": "recstore_bundle",
        "inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1, 2]}],
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1]}],
    }
    for path in ("/v2/models/pairs", "/v2/models/pairs/versions/1", "/v2/models/pairs/"):
        assert server.send(path).document == model
        assert server.send(f"{path.rstrip('/')}/ready").document == {"name": "pairs", "ready": True}
    assert server.send("/v2/health/live").document == {"live": True}
    assert server.send("/v2/health/ready").document == {"ready": True}
    assert server.send("/v2/health/ready", method="HEAD").body == b""
    assert served["mixed"].send("/v2/models/all%20types").document["name"] == "all types"

    with server.channel() as channel:
        assert call(channel, "ServerLive").live
        assert call(channel, "ServerReady").ready
        assert call(channel, "ModelReady", name="pairs").ready
        metadata = call(channel, "ServerMetadata")
        assert (metadata.name, metadata.version) == (described["name"], described["version"])
        found = call(channel, "ModelMetadata", name="pairs", version="1")
    assert (found.name, list(found.versions), found.platform) == ("pairs", ["1"], "recstore_bundle")
    for kind in ("inputs", "outputs"):
        tensors = [
            {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in getattr(found, kind)
        ]
        assert tensors == model[kind]


def test_ports_of_health_and_metrics_have_nothing_else(served: dict[str, ServedModel]) -> None:
    server = served["pairs"]
    assert server.send("/v2/health/live", port="health").document == {"live": True}
    assert server.send("/v2/health/ready", port="health").document == {"ready": True}
    for port, path in (("health", "/v2"), ("health", "/metrics"), ("metrics", "/v2/health/live")):
        assert server.send(path, port=port).error == f"there is no path {path!r}"
    assert b"recstore_model_build_info" in server.send("/metrics", port="metrics").body


@pytest.mark.parametrize("ids", [IDS, IDS[:1], IDS[:0]])
def test_json_is_answered_as_the_bundle_answers(served: dict[str, ServedModel], folder: Path, ids: Tensor) -> None:
    answered = served["pairs"].send("/v2/models/pairs/infer", pairs_body(ids, id="42"))
    assert answered.status == 200, answered.body
    document = answered.document
    (output,) = document.pop("outputs")
    assert document == {"model_name": "pairs", "model_version": "1", "id": "42"}
    assert torch.tensor(output.pop("data")).equal(load_bundle(folder / "pairs")(ids))
    assert output == {"name": "output", "datatype": "FP32", "shape": [len(ids)]}


def test_lists_may_be_flat_and_outputs_chosen(served: dict[str, ServedModel], folder: Path) -> None:
    entry = {"name": "ids", "datatype": "INT64", "shape": [4, 2], "data": IDS.flatten().tolist()}
    body = json.dumps({"inputs": [entry], "outputs": [{"name": "output"}], "model_name": "pairs"}).encode()
    answered = served["pairs"].send("/v2/models/pairs/versions/1/infer", body)
    assert "id" not in answered.document
    assert answered.document["outputs"][0]["data"] == load_bundle(folder / "pairs")(IDS).tolist()


def test_binary_data_goes_both_ways(served: dict[str, ServedModel], folder: Path) -> None:
    body, headers = binary_body(*mixed_inputs(), all_binary=True)
    answered = served["mixed"].send("/v2/models/all%20types/infer", body, headers)
    assert answered.status == 200, answered.body
    found, expected = tensors_of(answered), mixed_outputs(folder)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].equal(tensor), name


def test_binary_data_and_json_mix(served: dict[str, ServedModel], folder: Path) -> None:
    binary, headers = binary_body(*mixed_inputs(["ids", "flags"]))
    length = int(headers["Inference-Header-Content-Length"])
    document = json.loads(binary[:length])
    document["inputs"] += json.loads(infer_body(*mixed_inputs(["floats", "small", "bytes"])))["inputs"]
    document["parameters"] = {"binary_data_output": True}
    document["outputs"] = [{"name": "not"}, {"name": "sum", "parameters": {"binary_data": False}}]
    header = json.dumps(document).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    answered = served["mixed"].send("/v2/models/all%20types/infer", header + binary[length:], headers)
    assert answered.status == 200, answered.body
    length = int(answered.headers["Inference-Header-Content-Length"])
    first, second = json.loads(answered.body[:length])["outputs"]
    expected = mixed_outputs(folder)
    assert first == {"name": "not", "datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}}
    assert answered.body[length:] == bytes_of(expected["not"])
    assert second == {"name": "sum", "datatype": "FP32", "shape": [2], "data": expected["sum"].tolist()}


def test_numbers_that_are_not_finite_pass(served: dict[str, ServedModel]) -> None:
    inputs = json.loads(infer_body(*mixed_inputs()))["inputs"]
    inputs[1]["data"] = [[float("nan"), 0.0, 0.0], [float("-inf"), 0.0, 0.0]]
    body = json.dumps({"inputs": inputs, "outputs": [{"name": "sum"}]}).encode()
    answered = served["mixed"].send("/v2/models/all%20types/infer", body)
    nan, infinite = answered.document["outputs"][0]["data"]
    assert nan != nan
    assert infinite == float("-inf")


CONTENTS = {"INT64": "int64", "FP32": "fp32", "FP64": "fp64", "BOOL": "bool", "INT8": "int", "UINT8": "uint"}


@pytest.mark.parametrize("is_raw", [False, True])
def test_grpc_answers_as_the_bundle_does(served: dict[str, ServedModel], folder: Path, is_raw: bool) -> None:
    inputs = [
        {"name": name, "datatype": datatype, "shape": list(tensor.shape)}
        if is_raw
        else {
            "name": name,
            "datatype": datatype,
            "shape": list(tensor.shape),
            "contents": {f"{CONTENTS[datatype]}_contents": tensor.flatten().tolist()},
        }
        for name, (datatype, tensor) in MIXED.items()
    ]
    raw = [bytes_of(tensor) for _, tensor in MIXED.values()] if is_raw else []
    names = ["byte", "sum", "not", "double", "small"]
    outputs = [{"name": name} for name in names]
    expected = mixed_outputs(folder)
    with served["mixed"].channel() as channel:
        asked: dict[str, Any] = {"model_name": "all types", "id": "7", "inputs": inputs, "raw_input_contents": raw}
        answered = call(channel, "ModelInfer", **asked, outputs=outputs)
        everything = call(channel, "ModelInfer", **asked)
    assert (answered.model_name, answered.model_version, answered.id) == ("all types", "1", "7")
    assert [output.name for output in answered.outputs] == names
    for number, output in enumerate(answered.outputs):
        assert list(output.shape) == list(expected[output.name].shape)
        if is_raw:
            assert answered.raw_output_contents[number] == bytes_of(expected[output.name])
        else:
            contents = list(getattr(output.contents, f"{CONTENTS[output.datatype]}_contents"))
            assert torch.tensor(contents, dtype=DTYPES[output.datatype]).equal(expected[output.name].flatten())
    assert [bytes_of(tensor) for tensor in expected.values()] == list(everything.raw_output_contents), (
        "FP16 has no list, so all outputs are raw"
    )


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_request_of_grpc_chooses_how_outputs_are_written(served: dict[str, ServedModel], is_raw: bool) -> None:
    entry = {
        "name": "ids",
        "datatype": "INT64",
        "shape": [4, 2],
        "contents": {"int64_contents": IDS.flatten().tolist()},
    }
    with served["pairs"].channel() as channel:
        parameters = {"binary_data_output": {"bool_param": is_raw}}
        answered = call(channel, "ModelInfer", model_name="pairs", inputs=[entry], parameters=parameters)
    assert (len(answered.raw_output_contents), len(answered.outputs[0].contents.fp32_contents)) == (
        (1, 0) if is_raw else (0, 4)
    )


def test_offsets_are_answered_request_by_request(served: dict[str, ServedModel], folder: Path) -> None:
    ids, offsets = torch.arange(50), torch.tensor([0, 0, 20, 50])
    body = infer_body(("input", "INT64", ids), ("offsets", "INT64", offsets))
    answered = served["bags"].send("/v2/models/bags/infer", body)
    (output,) = answered.document["outputs"]
    assert (output["name"], output["shape"]) == ("output", [4, 4])
    assert torch.tensor(output["data"]).reshape(4, 4).equal(load_bundle(folder / "bags")(ids, offsets))


def test_sixteen_bits_go_as_binary_data(tmp_path: Path) -> None:
    halves, brains = torch.tensor([0.5, 65504.0]).half(), torch.tensor([1.5, -3e38]).bfloat16()
    export(Halves(), (halves, brains), tmp_path / "halves")
    with ServedModel(tmp_path / "halves", "--grpc-port", 0) as server, server.channel() as channel:
        inputs = (("halves", "FP16", halves), ("brains", "BF16", brains))
        body, headers = binary_body(*inputs, all_binary=True)
        found = tensors_of(server.send("/v2/models/halves/infer", body, headers))
        assert list(found) == ["output_0", "output_1"]
        assert found["output_0"].equal(halves * 2)
        assert found["output_1"].equal(brains * 2)
        entries = [{"name": name, "datatype": datatype, "shape": [2]} for name, datatype, _ in inputs]
        raw = [bytes_of(tensor) for *_, tensor in inputs]
        answered = call(channel, "ModelInfer", model_name="halves", inputs=entries, raw_input_contents=raw)
        assert list(answered.raw_output_contents) == [bytes_of(halves * 2), bytes_of(brains * 2)]

        body, headers = binary_body(*inputs)
        refused = server.send("/v2/models/halves/infer", body, headers)
        assert (refused.status, refused.error) == (400, "output 'output_0' is FP16: ask for it as binary data")
        refused = server.send("/v2/models/halves/infer", infer_body(*inputs))
        assert (refused.status, refused.error) == (400, "output 'output_0' is FP16: ask for it as binary data")
        body = infer_body(*inputs, parameters={"binary_data_output": True})
        refused = server.send("/v2/models/halves/infer", body)
        assert refused.error == "input 'halves' is FP16, which goes as binary data only"
        entries = [{**entry, "contents": {"fp32_contents": [1.0, 2.0]}} for entry in entries]
        with pytest.raises(grpc.RpcError, match="'halves' is FP16, which goes in raw_input_contents only"):
            call(channel, "ModelInfer", model_name="halves", inputs=entries)


def test_metrics_count_what_was_asked(folder: Path) -> None:
    with ServedModel(folder / "pairs", "--grpc-port", 0) as server, server.channel() as channel:
        for _ in range(3):
            assert server.send("/v2/models/pairs/infer", pairs_body(IDS)).status == 200
        assert server.send("/v2/models/pairs/infer", b"{").status == 400
        assert server.send("/v2/models/other/infer", b"{}").status == 404
        with pytest.raises(grpc.RpcError):
            call(channel, "ModelInfer", model_name="pairs")
        assert server.metric('requests_total{model="pairs",protocol="http",outcome="ok"}') == 3
        assert server.metric('requests_total{model="pairs",protocol="http",outcome="invalid"}') == 1
        assert server.metric('requests_total{model="pairs",protocol="http",outcome="unknown"}') == 1
        assert server.metric('requests_total{model="pairs",protocol="grpc",outcome="invalid"}') == 1
        assert server.metric("recstore_model_rows_total") == 12
        assert server.metric('request_seconds_count{model="pairs",protocol="http"}') == 5
        assert server.metric('request_seconds_bucket{model="pairs",protocol="http",le="+Inf"}') == 5
        assert server.metric("recstore_model_forward_seconds_count") == 3
        assert server.metric('recstore_model_batch_rows_bucket{model="pairs",le="4"}') == 3
        assert server.metric('recstore_model_batch_rows_bucket{model="pairs",le="2"}') == 0
        assert server.metric("recstore_model_batch_rows_sum") == 12
        assert server.metric("recstore_model_batch_requests_sum") == 3
        # The port notices in its own time that the connections of other requests are closed.
        wait_until(lambda: server.metric('recstore_model_connections{model="pairs",port="http"}') == 1)
        assert server.metric("recstore_model_ready") == 1
        for gauge in ("queued_requests", "requests_in_flight"):
            assert server.metric(f"recstore_model_{gauge}") == 0


def test_metrics_are_documented() -> None:
    from recstore_ops.serving.server.metrics import Metrics

    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    told = {line.split()[2] for line in Metrics('a "name"\\').text().splitlines() if line.startswith("# TYPE")}
    gauges = ("connections", "queued_requests", "requests_in_flight", "ready")
    for name in told | {f"recstore_model_{gauge}" for gauge in gauges}:
        assert f"`{name}" in text, name
    assert 'model="a \\"name\\"\\\\"' in Metrics('a "name"\\').text()


def test_the_compiled_messages_are_those_of_the_source(tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    from grpc_tools import protoc

    source = COMPILED.with_suffix(".proto")
    compiled = tmp_path / COMPILED.name
    assert protoc.main(["", f"-I{source.parent}", f"--descriptor_set_out={compiled}", str(source)]) == 0
    read = descriptor_pb2.FileDescriptorSet.FromString
    assert read(COMPILED.read_bytes()) == read(compiled.read_bytes()), "compile it again, as the source says"


class Nested(nn.Module):
    """Outputs within outputs."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Returns a dictionary of tuples."""
        return {"all": (x, [x + 1]), "last": x + 2}


class Numbers(nn.Module):
    """An output that is no tensor."""

    def forward(self, x: Tensor, times: int) -> tuple[Tensor, int]:
        """Returns both."""
        return x * times, times


class Complex(nn.Module):
    """A type that the protocol does not have."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns complex numbers."""
        return torch.complex(x, x)


class Constant(nn.Module):
    """An output that is no tensor, of tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns a number too."""
        return x + 1, 3


def test_outputs_within_outputs_have_names(tmp_path: Path) -> None:
    export(Nested(), (torch.ones(2),), tmp_path / "nested")
    with ServedModel(tmp_path / "nested") as server:
        body = infer_body(("x", "FP32", torch.zeros(1)))
        outputs = server.send("/v2/models/nested/infer", body).document["outputs"]
    assert {output["name"]: output["data"] for output in outputs} == {"all.0": [0], "all.1.0": [1], "last": [2]}


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (Numbers(), (torch.ones(2), 3), "input 'times' is of type int; requests carry tensors only"),
        (Constant(), (torch.ones(2),), "output 'output_1' is of type int; answers carry tensors only"),
        (Complex(), (torch.ones(2),), "output 'output' has dtype complex64, which the protocol does not know"),
        (Nested(), (torch.ones(2, dtype=torch.complex64),), "input 'x' has dtype complex64, which the protocol"),
    ],
)
def test_bundles_that_the_protocol_cannot_carry_are_refused(
    tmp_path: Path, model: nn.Module, inputs: tuple[Any, ...], message: str
) -> None:
    # A number among the inputs leaves a program without a graph.
    has_graph = all(isinstance(each, Tensor) for each in inputs)
    with nullcontext() if has_graph else pytest.warns(UserWarning, match="has no graph, because of an input that is"):
        export(model, inputs, tmp_path / "model")
    refused = run_recstore("serve-model", tmp_path / "model", *([] if has_graph else ["--trust-code"]))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr
