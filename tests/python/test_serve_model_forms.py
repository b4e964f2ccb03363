"""JSON of every form at `recstore serve-model`: an error says why, and memory is bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from served_models import ServedModel, call_with, pairs, pairs_body
from strange_json import STRANGE, changed, paths

from recstore_ops.serving.server.grpc_service import message_class

pytestmark = pytest.mark.tier("all")

INFER = "/v2/models/pairs/infer"
IDS = torch.tensor([[1, 2], [3, 4]])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """A server of `Pairs` with the limits that it has by default."""
    bundle = pairs(tmp_path_factory.mktemp("bundles") / "pairs", "json_forms")
    with ServedModel(bundle, "--grpc-port", 0) as server:
        yield server


def test_every_form_of_a_request_is_answered(server: ServedModel) -> None:
    outputs = [{"name": "output", "parameters": {"binary_data": False}}]
    document = json.loads(pairs_body(IDS, id="a", outputs=outputs, parameters={"binary_data_output": False}))
    assert server.send(INFER, json.dumps(document).encode()).status == 200
    for path in paths(document):
        for strange in STRANGE:
            answered = server.send(INFER, changed(document, path, strange).encode())
            assert answered.status in (200, 400, 413), (path, strange[:50], answered.status)
            assert answered.status == 200 or answered.error
    assert server.send(INFER, pairs_body(IDS)).status == 200


def peak(server: ServedModel) -> int:
    """The most memory that the process ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text("utf-8"))
    assert found
    return int(found[1]) * 1024


@pytest.mark.parametrize("item", ["0", "-6", "300", "1.5", "[]", "{}", "[1]", '{"":0}', '""', '"ab"', "null"])
@pytest.mark.parametrize("key", ["data", "inputs", "id"])
def test_memory_stays_within_sixteen_times_the_bytes(server: ServedModel, key: str, item: str) -> None:
    size = 4_000_000
    assert server.send(INFER, pairs_body(IDS)).status == 200
    bomb = "[" + f"{item}," * ((size - 200) // (len(item) + 1)) + item + "]"
    path = ("inputs", 0, "data") if key == "data" else (key,)
    body = changed(json.loads(pairs_body(IDS, id="a")), path, bomb)
    before = server.resident_bytes
    refused = server.send(INFER, body.encode())
    assert refused.status in (400, 413), refused.error
    assert peak(server) - before <= 16 * size + (64 << 20)


def test_thousands_of_inputs_over_grpc_are_refused(server: ServedModel) -> None:
    message = message_class("ModelInferRequest")(model_name="pairs", inputs=[{}] * 20_000)
    with server.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        call_with(channel, "ModelInfer", message.SerializeToString())
    assert refused.value.details() == "the request has 20000 inputs, at most 10000 are taken"  # type: ignore[attr-defined]
