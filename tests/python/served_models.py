"""Bundles, and `recstore serve-model` in processes of their own, for tests."""

from __future__ import annotations

import http.client
import json
import re
import signal
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import torch
from torch import Tensor, nn
from warm_recstore import WarmRecstore

from recstore_ops import DistEmbedding, DistEmbeddingBag
from recstore_ops.ops import operators
from recstore_ops.serving import export
from recstore_ops.serving.server.grpc_service import SERVICE, message_class

TOKEN = "a secret"
_MAIN = re.compile(r'^model ".*" at (https?)://([^\s,;]+)')
_OTHER = {
    "grpc": re.compile(r", gRPC at ([^\s,;]+)"),
    "health": re.compile(r", health at http://([^/]+)/v2/health/ready"),
    "metrics": re.compile(r", metrics at http://([^/]+)/metrics"),
}


class Pairs(nn.Module):
    """Inner products of the rows of users and items: the same bits whatever else is in a batch."""

    def __init__(self, user: str, item: str) -> None:
        super().__init__()
        self.user, self.item = DistEmbedding(None, 4, user), DistEmbedding(None, 4, item)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns scores [B] of ids [B, 2]."""
        return (self.user(ids[:, 0]) * self.item(ids[:, 1])).sum(1)


class Mixed(nn.Module):
    """Inputs and outputs of every type of elements that torch computes with."""

    def forward(self, ids: Tensor, floats: Tensor, flags: Tensor, small: Tensor, bytes: Tensor) -> dict[str, Tensor]:
        """Returns a dictionary of outputs, [B] or [B, 3]."""
        return {
            "sum": floats.sum(1) + ids.sum(1),
            "double": floats.double() * 2,
            "half": floats.half(),
            "not": ~flags,
            "small": small + 1,
            "byte": bytes + 1,
        }


MIXED = {
    "ids": ("INT64", torch.tensor([[1, -2], [2**40, 3]])),
    "floats": ("FP32", torch.tensor([[0.1, -2.5, 3.0], [1e-30, float("inf"), 7.25]])),
    "flags": ("BOOL", torch.tensor([True, False])),
    "small": ("INT8", torch.tensor([-128, 126], dtype=torch.int8)),
    "bytes": ("UINT8", torch.tensor([0, 254], dtype=torch.uint8)),
}


class Halves(nn.Module):
    """An input of 16 bits."""

    def forward(self, halves: Tensor, brains: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both doubled."""
        return halves * 2, brains * 2


class Slow(nn.Module):
    """A call of a row takes tenths of a second."""

    def __init__(self, steps: int = 300) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(512, 512) / 30)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        """Returns [B] of [B]."""
        rows = x[:, None, None] + self.matrix
        for _ in range(self.steps):
            rows = torch.tanh(rows @ self.matrix)
        return rows.sum((1, 2))


def pairs(directory: Path, name: str, rows: int = 100) -> Path:
    """Writes a bundle of `Pairs` with rows of the ids from 0."""
    model = Pairs(f"{name}/user", f"{name}/item")
    generator = torch.Generator().manual_seed(1)
    for module in (model.user, model.item):
        operators.emb_write(module.table.handle, torch.arange(rows), torch.randn(rows, 4, generator=generator))
    return export(model, (torch.tensor([[1, 2], [3, 4], [5, 6]]),), directory)


def mixed(directory: Path) -> Path:
    """Writes a bundle of `Mixed`."""
    return export(Mixed(), tuple(torch.cat([tensor, tensor]) for _, tensor in MIXED.values()), directory)


def bags(directory: Path, name: str) -> Path:
    """Writes a bundle of sums of rows, whose ids and offsets vary on their own."""
    bag = DistEmbeddingBag(None, 4, name, mode="sum")
    operators.emb_write(bag.table.handle, torch.arange(100), torch.randn(100, 4))
    return export(bag, (torch.arange(6), torch.tensor([0, 2, 5])), directory)


@dataclass(frozen=True)
class Answered:
    """An answer over HTTP."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The message of a refusal."""
        assert self.headers["Content-Type"].startswith("application/json")
        assert list(self.document) == ["error"]
        return self.document["error"]


class ServedModel:
    """`recstore serve-model DIR` in a process of its own, ended with the block.

    Attributes:
        line: what it printed when it began to listen.
        addresses: `host:port` by port: `http`, and those of `grpc`, `health` and `metrics` that options ask for.
    """

    def __init__(self, directory: Path, *options: object, tls: ssl.SSLContext | None = None, token: str = "") -> None:
        self.process = WarmRecstore("serve-model", directory, "--port", 0, *options, splits=True)
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.line = self.process.stdout.readline()
        found = _MAIN.match(self.line)
        if found is None:
            self.process.kill()
            assert self.process.stderr is not None
            raise AssertionError(self.line + self.process.stderr.read())
        self.addresses = {"http": found[2]}
        self.addresses |= {name: found[1] for name, text in _OTHER.items() if (found := text.search(self.line))}

    def connection(self, port: str = "http") -> http.client.HTTPConnection:
        """Opens a connection of HTTP."""
        address = self.addresses[port]
        if self._tls is not None and port == "http":
            return http.client.HTTPSConnection(address, timeout=60, context=self._tls)
        return http.client.HTTPConnection(address, timeout=60)

    def send(
        self,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        method: str | None = None,
        port: str = "http",
    ) -> Answered:
        """Sends one request over a connection of its own."""
        connection = self.connection(port)
        connection.request(
            method or ("GET" if body is None else "POST"), path, body, {**self._headers, **(headers or {})}
        )
        response = connection.getresponse()
        answered = Answered(response.status, response.headers, response.read())
        connection.close()
        return answered

    def channel(self, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
        """Opens a connection of gRPC."""
        address = self.addresses["grpc"]
        return grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)

    def metric(self, text: str) -> float:
        """Returns the sum of the samples whose names and labels contain a text."""
        lines = self.send("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if text in line and not line.startswith("#"))

    @property
    def resident_bytes(self) -> int:
        """The memory that the process has, as the system counts it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found, status
        return int(found[1]) * 1024

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        written, errors = self.process.communicate(60)
        # Peers that a test makes misbehave are told of.
        faults = [line for line in errors.splitlines() if "peer refused" not in line]
        if error is None:
            assert (self.process.returncode, written, faults) == (0, "", []), (
                f"{self.process.returncode} {written}{errors}"
            )


def call(channel: grpc.Channel, method: str, token: str = "", **fields: Any) -> Any:
    """Calls a method of the protocol with a message of these fields."""
    return call_with(channel, method, message_class(f"{method}Request")(**fields).SerializeToString(), token)


def call_with(channel: grpc.Channel, method: str, message: bytes, token: str = "") -> Any:
    """Calls a method of the protocol with these bytes."""
    calling = channel.unary_unary(
        f"/{SERVICE}/{method}", response_deserializer=message_class(f"{method}Response").FromString
    )
    return calling(message, timeout=60, metadata=(("authorization", f"Bearer {token}"),) if token else None)


def infer_body(*inputs: tuple[str, str, Tensor], **further: Any) -> bytes:
    """Returns a request in JSON."""
    entries = [
        {"name": name, "datatype": datatype, "shape": list(tensor.shape), "data": tensor.tolist()}
        for name, datatype, tensor in inputs
    ]
    return json.dumps({"inputs": entries, **further}).encode()


def pairs_body(ids: Tensor, **further: Any) -> bytes:
    """Returns a request for `Pairs` in JSON."""
    return infer_body(("ids", "INT64", ids), **further)


def binary_body(
    *inputs: tuple[str, str, Tensor], outputs: Any = None, all_binary: bool = False
) -> tuple[bytes, dict[str, str]]:
    """Returns a request whose inputs are binary data, and its headers."""
    contents = [bytes_of(tensor) for _, _, tensor in inputs]
    entries = [
        {"name": name, "datatype": datatype, "shape": list(tensor.shape), "parameters": {"binary_data_size": len(own)}}
        for (name, datatype, tensor), own in zip(inputs, contents, strict=True)
    ]
    document = {"inputs": entries, "parameters": {"binary_data_output": all_binary}}
    header = json.dumps(document if outputs is None else {**document, "outputs": outputs}).encode()
    return header + b"".join(contents), {"Inference-Header-Content-Length": str(len(header))}


def bytes_of(tensor: Tensor) -> bytes:
    """Returns the elements of a tensor as binary data."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def tensors_of(answered: Answered) -> dict[str, Tensor]:
    """Returns the outputs of an answer whose contents are all binary data."""
    length = int(answered.headers["Inference-Header-Content-Length"])
    begin, found = length, {}
    for output in json.loads(answered.body[:length])["outputs"]:
        end = begin + output["parameters"]["binary_data_size"]
        content = bytearray(answered.body[begin:end])
        found[output["name"]] = torch.frombuffer(content, dtype=DTYPES[output["datatype"]]).reshape(output["shape"])
        begin = end
    assert begin == len(answered.body)
    return found


DTYPES = {
    "BOOL": torch.bool,
    "INT8": torch.int8,
    "INT64": torch.int64,
    "UINT8": torch.uint8,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
