"""Requests per second and latencies of `recstore serve-model`, on this machine.

    python benches/serve_model.py DIR [--rows 128] [--connections 8] [--seconds 10] [--load 0.6] [-- OPTIONS]

DIR is a bundle, OPTIONS are those of `serve-model`. First a closed loop: so many connections, each sends a request as
soon as it has its answer. Then an open loop at a part of that rate: requests begin at random moments whether or not
others are answered, and a latency counts from the moment at which a request should have begun. Requests are binary data
with ids drawn evenly. "A core" divides by the processor time of the server, not by the cores of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_BODIES = 64
_CODES = {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"} | {
    f"{sign}INT{bits}": f"<{'u' if sign else 'i'}{bits // 8}" for sign in ("", "U") for bits in (8, 16, 32, 64)
}


@dataclass
class Loop:
    """What came of a loop.

    Attributes:
        name: closed, or open with its rate.
        seconds: how long it took.
        cpu: processor seconds of the server meanwhile.
        latencies: of each answer, in seconds.
        refused: answers with another status than 200.
    """

    name: str
    seconds: float = 0.0
    cpu: float = 0.0
    latencies: list[float] = field(default_factory=list)
    refused: int = 0

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies) / self.seconds

    def line(self) -> str:
        """Returns its row of the table."""
        if not self.latencies:
            raise SystemExit(f"{self.name}: no request was answered, {self.refused} were refused")
        p50, p99 = (1e3 * value for value in np.percentile(self.latencies, (50, 99)))
        a_core = f"{len(self.latencies) / self.cpu:,.0f}" if self.cpu else "none"
        return f"| {self.name} | {self.rate:,.0f} | {a_core} | {p50:.2f} | {p99:.2f} | {self.refused} |"


class Served:
    """A server process, ended with the block."""

    def __init__(self, directory: str, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "recstore_ops.cli", "serve-model", directory, "--port", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.match(r'model "(.*)" at http://([^:]+):(\d+)', line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        print(line, end="")
        self.name, self.host, self.port = found[1], found[2], int(found[3])

    def inputs(self) -> list[dict[str, Any]]:
        """Returns what the model takes."""
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/v2/models/{self.name}") as answer:
            return json.load(answer)["inputs"]

    @property
    def cpu(self) -> float:
        """Processor seconds until now."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def request_of(name: str, inputs: Sequence[dict[str, Any]], rows: int, ids: int, seed: int) -> bytes:
    """Returns the bytes of a request."""
    generator = np.random.default_rng(seed)
    entries, contents = [], []
    for spec in inputs:
        if spec["datatype"] not in _CODES or -1 in spec["shape"][1:]:
            raise SystemExit(f"input {spec['name']} has {spec['datatype']} {spec['shape']}, which nothing is drawn for")
        shape = [rows if size == -1 else size for size in spec["shape"]]
        code = np.dtype(_CODES[spec["datatype"]])
        bound = min(ids, np.iinfo(code).max) if code.kind in "iu" else 2
        drawn = generator.random(shape) if code.kind == "f" else generator.integers(0, bound, shape)
        contents.append(drawn.astype(code).tobytes())
        parameters = {"binary_data_size": len(contents[-1])}
        entries.append({"name": spec["name"], "datatype": spec["datatype"], "shape": shape, "parameters": parameters})
    header = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    body = b"".join((header, *contents))
    head = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: bench\r\nInference-Header-Content-Length: {len(header)}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """A connection that sends one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, served: Served) -> Connection:
        """Connects."""
        return cls(*await asyncio.open_connection(served.host, served.port))

    async def ask(self, request: bytes) -> bool:
        """Returns whether a request was answered, and not refused."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\nContent-Length: (\d+)", head)
        assert length, head
        await self._reader.readexactly(int(length[1]))
        return head.startswith(b"HTTP/1.1 200")

    def close(self) -> None:
        """Ends it."""
        self._writer.close()


async def _timed(loop: Loop, connection: Connection, request: bytes, begin: float) -> None:
    if await connection.ask(request):
        loop.latencies.append(time.perf_counter() - begin)
    else:
        loop.refused += 1


async def closed_loop(served: Served, requests: Sequence[bytes], connections: int, seconds: float) -> Loop:
    """Asks over each connection as soon as it has its answer."""
    loop = Loop(f"closed, {connections} connections")
    end = time.perf_counter() + seconds

    async def ask(connection: Connection) -> None:
        while (begin := time.perf_counter()) < end:
            await _timed(loop, connection, random.choice(requests), begin)

    opened = [await Connection.open(served) for _ in range(connections)]
    await asyncio.gather(*(ask(connection) for connection in opened))
    for connection in opened:
        connection.close()
    return loop


async def open_loop(served: Served, requests: Sequence[bytes], rate: float, seconds: float) -> Loop:
    """Asks at random moments, so many per second on average, over as many connections as that takes."""
    loop = Loop(f"open, {rate:,.0f} per second")
    free: list[Connection] = []
    tasks: set[asyncio.Task[None]] = set()

    async def ask(begin: float) -> None:
        connection = free.pop() if free else await Connection.open(served)
        await _timed(loop, connection, random.choice(requests), begin)
        free.append(connection)

    begin = time.perf_counter()
    end = begin + seconds
    while begin < end:
        await asyncio.sleep(max(begin - time.perf_counter(), 0))
        task = asyncio.create_task(ask(begin))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        begin += random.expovariate(rate)
    await asyncio.gather(*tasks)
    for connection in free:
        connection.close()
    return loop


def _measured(served: Served, running: Any) -> Loop:
    begin, cpu = time.perf_counter(), served.cpu
    loop = asyncio.run(running)
    loop.seconds, loop.cpu = time.perf_counter() - begin, served.cpu - cpu
    return loop


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", help="the bundle")
    parser.add_argument("--rows", type=int, default=128, help="rows of a request, such as candidates")
    parser.add_argument("--ids", type=int, default=100_000, help="integers are drawn from 0 up to this")
    parser.add_argument("--connections", type=int, default=8, help="of the closed loop")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each loop")
    parser.add_argument("--load", type=float, default=0.6, help="of the open loop, as a part of the closed one's rate")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = parser.parse_args(arguments[:end])
    with Served(given.directory, arguments[end + 1 :]) as served:
        inputs = served.inputs()
        requests = [request_of(served.name, inputs, given.rows, given.ids, seed) for seed in range(_BODIES)]
        _measured(served, closed_loop(served, requests, given.connections, min(given.seconds, 1.0)))  # Warms up.
        print("| loop | requests/s | requests/s a core | p50, ms | p99, ms | refused |\n|---|---|---|---|---|---|")
        closed = _measured(served, closed_loop(served, requests, given.connections, given.seconds))
        print(closed.line(), flush=True)
        print(_measured(served, open_loop(served, requests, given.load * closed.rate, given.seconds)).line())


if __name__ == "__main__":
    main()
