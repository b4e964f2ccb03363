"""Requests joined to one call of a model: which, how many, what each gets; a queue that is full, threads, failures."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from served_models import ServedModel, Slow, infer_body, pairs, pairs_body
from torch import Tensor, nn

from recstore_ops.cli.serve_model import serve_model_command
from recstore_ops.serving import export, load_bundle
from recstore_ops.serving.server import serving
from recstore_ops.serving.server.batching import Batcher
from recstore_ops.serving.server.metrics import Metrics
from recstore_ops.serving.server.model_server import ModelServer
from recstore_ops.serving.server.refusals import Kind, Refusal
from recstore_ops.serving.server.settings import ModelServerSettings

pytestmark = pytest.mark.tier("test")


class Recorded:
    """A program that doubles its inputs, and notes the rows of each call; it waits until it may go on."""

    def __init__(self, *, waits: bool = False) -> None:
        self.calls: list[list[float]] = []
        self.threads: set[str] = set()
        self.may_go = threading.Event()
        self.at_once = self.most_at_once = 0
        if not waits:
            self.may_go.set()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.calls.append(inputs[0].flatten().tolist())
        self.threads.add(threading.current_thread().name)
        assert self.may_go.wait(30)
        self.at_once -= 1
        if bool((inputs[0] < 0).any()):
            raise IndexError("no negative numbers\nat all")
        if bool((inputs[0] > 1e6).any()):
            raise RuntimeError
        return [inputs[0] * 2, inputs[0].sum(1)]


def run(
    program: Recorded, task: Callable[[Batcher], Awaitable[Any]], *, joins: bool = True, **settings: Any
) -> tuple[Any, Metrics]:
    """Runs a task beside a queue."""
    metrics = Metrics("model")

    async def main() -> Any:
        batcher = Batcher(program, joins, ModelServerSettings(**settings), metrics)
        try:
            return await task(batcher)
        finally:
            program.may_go.set()
            batcher.close()

    return asyncio.run(main()), metrics


def rows(*numbers: float) -> list[Tensor]:
    """The inputs of a request, [B, 1]."""
    return [torch.tensor(numbers)[:, None]]


async def after_the_first(batcher: Batcher, program: Recorded, *requests: list[Tensor]) -> list[Any]:
    """Asks for the others while a call for the first is under way, and returns all answers."""
    first = asyncio.create_task(batcher.run(requests[0]))
    while not program.calls:
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(batcher.run(each)) for each in requests[1:]]
    await asyncio.sleep(0.01)
    program.may_go.set()
    return await asyncio.gather(first, *others, return_exceptions=True)


def test_what_came_during_a_call_is_joined() -> None:
    program = Recorded(waits=True)
    requests = [rows(0), rows(1, 2), rows(3), rows(), rows(4, 5, 6)]
    answers, metrics = run(program, lambda batcher: after_the_first(batcher, program, *requests))
    assert program.calls == [[0], [1, 2, 3, 4, 5, 6]]
    for (first, second), (given,) in zip(answers, requests, strict=True):
        assert first.equal(given * 2)
        assert second.equal(given.sum(1))
    assert 'recstore_model_batch_requests_sum{model="model"} 5' in metrics.text()
    assert 'recstore_model_batch_requests_count{model="model"} 2' in metrics.text()


def test_no_call_has_more_rows_than_it_may_and_order_is_kept() -> None:
    program = Recorded(waits=True)
    requests = [rows(0), rows(1, 2), rows(3, 4), rows(5), rows(*range(6, 12)), rows(12)]
    run(program, lambda batcher: after_the_first(batcher, program, *requests), max_batch=4)
    assert program.calls == [[0], [1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11], [12]], "a larger request runs alone"


def test_other_shapes_are_not_joined() -> None:
    program = Recorded(waits=True)
    requests = [rows(0), rows(1), [torch.ones(1, 2)], rows(2), rows(3)]
    run(program, lambda batcher: after_the_first(batcher, program, *requests))
    assert program.calls == [[0], [1], [1, 1], [2, 3]]


def test_requests_that_cannot_be_joined_run_alone() -> None:
    program = Recorded(waits=True)
    requests = [rows(0), rows(1), rows(2)]
    run(program, lambda batcher: after_the_first(batcher, program, *requests), joins=False)
    assert program.calls == [[0], [1], [2]]


def test_a_failure_is_of_its_own_request() -> None:
    program = Recorded(waits=True)
    requests = [rows(0), rows(1), rows(-2), rows(1e9)]
    answers, _ = run(program, lambda batcher: after_the_first(batcher, program, *requests))
    assert [answer[0].tolist() for answer in answers[:2]] == [[[0]], [[2]]]
    assert (str(answers[2]), answers[2].kind) == (
        "the model refuses the inputs: no negative numbers",
        Kind.INVALID,
    )
    assert (str(answers[3]), answers[3].kind) == ("the model failed: RuntimeError", Kind.FAILED)


def test_a_request_waits_for_others_no_longer_than_it_may() -> None:
    program = Recorded()

    async def two(batcher: Batcher) -> float:
        begin = time.monotonic()
        first = asyncio.create_task(batcher.run(rows(1)))
        await asyncio.sleep(0)
        await asyncio.gather(first, batcher.run(rows(2)))
        return time.monotonic() - begin

    waited, _ = run(program, two, max_delay_us=400_000, max_batch=4)
    assert program.calls == [[1, 2]]
    assert 0.35 < waited < 60


def test_a_batch_that_is_full_waits_for_no_others() -> None:
    program = Recorded()

    async def two(batcher: Batcher) -> None:
        await asyncio.gather(batcher.run(rows(3, 4)), batcher.run(rows(5, 6)))

    begin = time.monotonic()
    run(program, two, max_delay_us=600_000_000, max_batch=4)
    assert program.calls == [[3, 4, 5, 6]]
    assert time.monotonic() - begin < 60, "it may wait for ten minutes"


def test_a_full_queue_refuses() -> None:
    program = Recorded(waits=True)

    async def fill(batcher: Batcher) -> tuple[Any, int]:
        waiting = [asyncio.create_task(batcher.run(rows(number))) for number in range(3)]
        while not program.calls:
            await asyncio.sleep(0.001)
        length = len(batcher)
        try:
            with pytest.raises(Refusal, match="2 requests wait already: try again later") as refused:
                await batcher.run(rows(3))
        finally:
            program.may_go.set()
        await asyncio.gather(*waiting)
        return refused.value.kind, length

    assert run(program, fill, max_queue=2)[0] == (Kind.BUSY, 2)
    assert program.calls == [[0], [1, 2]]


def test_clients_that_have_gone_are_passed_over() -> None:
    program = Recorded(waits=True)

    async def leave(batcher: Batcher) -> None:
        tasks = [asyncio.create_task(batcher.run(rows(number))) for number in range(4)]
        while not program.calls:
            await asyncio.sleep(0.001)
        for number in (0, 1, 3):
            tasks[number].cancel()
        program.may_go.set()
        await asyncio.wait(tasks)
        assert (await tasks[2])[0].tolist() == [[4]]

    run(program, leave)
    assert program.calls == [[0], [2]]


def test_calls_run_on_as_many_threads_as_there_are_workers() -> None:
    program = Recorded(waits=True)

    async def ask(batcher: Batcher) -> None:
        tasks = [asyncio.create_task(batcher.run(rows(number))) for number in range(6)]
        while program.at_once < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        program.may_go.set()
        await asyncio.gather(*tasks)

    run(program, ask, joins=False, workers=3)
    assert program.most_at_once == 3
    assert len(program.threads) == 3
    assert all(name.startswith("recstore-model") for name in program.threads)


def test_torch_has_the_threads_that_it_may_have() -> None:
    found: list[int] = []
    before = torch.get_num_threads()

    def program(inputs: Sequence[Tensor]) -> list[Tensor]:
        found.append(torch.get_num_threads())
        return list(inputs)

    async def main() -> None:
        batcher = Batcher(program, False, ModelServerSettings(torch_threads=2), Metrics("model"))
        await batcher.run(rows(1))
        batcher.close()

    try:
        asyncio.run(main())
    finally:
        torch.set_num_threads(before)
    assert found == [2]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="--max-pending-bytes 10 has no room for one request of --max-body 11"):
        ModelServerSettings(max_pending_bytes=10, max_body=11)


class OverBatch(nn.Module):
    """What a row gives depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [B] of [B, 2]."""
        return torch.softmax(x.sum(1), 0)


class OneNumber(nn.Module):
    """An output without rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns a mean."""
        return x.mean()


class Squares(nn.Module):
    """As many columns as rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [B, B] of [B, 2]."""
        return x @ x.T


class Chosen(nn.Module):
    """An embedding without a row 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(1, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns [B] of ids [B]."""
        return self.rows(ids).sum(1)


class Fixed(nn.Module):
    """A batch of two."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns as much."""
        return x + torch.tensor([1.0, 2.0])


class Nothing(nn.Module):
    """No inputs."""

    def forward(self) -> Tensor:
        """Returns ones."""
        return torch.ones(2)


class Doubled(nn.Module):
    """Two dimensions that vary, the second on its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns as much."""
        return x * 2


X, LENGTHS = torch.rand(3, 2), [{0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}]


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (OverBatch(), (X,), "rows of output depend on the other rows of a batch"),
        (OneNumber(), (X,), "output has no dimensions"),
        (Squares(), (X,), "a later dimension of output varies with the first"),
        (
            Chosen(),
            (torch.zeros(3, dtype=torch.int64),),
            "the model refuses made-up inputs: aten::embedding.default: index out of range in self",
        ),
        (Fixed(), (torch.rand(2),), "the first dimension of x is always 2"),
        (Nothing(), (), "the first dimension of output is always 2"),
        (Doubled(), (X,), None),
    ],
)
def test_what_is_joined_is_decided_by_the_program(
    tmp_path: Path, model: nn.Module, inputs: tuple[Tensor, ...], reason: str | None
) -> None:
    bundle = load_bundle(export(model, inputs, tmp_path / "model"))
    assert ModelServer(bundle, "model", ModelServerSettings()).signature.alone == reason
    assert ModelServer(bundle, "model", ModelServerSettings(max_batch=1)).signature.alone == "--max-batch is 1"


def test_lengths_that_vary_are_joined_where_they_are_equal(tmp_path: Path) -> None:
    bundle = load_bundle(export(Doubled(), (X,), tmp_path / "model", dynamic_shapes=LENGTHS))
    server = ModelServer(bundle, "model", ModelServerSettings())
    assert (server.signature.alone, server.signature.inputs[0].public_shape) == (None, [-1, -1])


async def asked_at_once(server: ServedModel, path: str, bodies: Sequence[bytes]) -> list[tuple[int, Any]]:
    """Sends requests over a connection each, at once."""

    async def ask(session: aiohttp.ClientSession, body: bytes) -> tuple[int, Any]:
        async with session.post(f"http://{server.addresses['http']}{path}", data=body) as response:
            return response.status, json.loads(await response.read())

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(ask(session, body) for body in bodies))


def test_joined_answers_equal_the_bundles_to_the_bit(tmp_path: Path) -> None:
    bundle = pairs(tmp_path / "pairs", "serve_model_batching")
    program = load_bundle(bundle)
    generator = torch.Generator().manual_seed(3)
    requests = [torch.randint(0, 120, (number % 5, 2), generator=generator) for number in range(60)]
    with ServedModel(bundle, "--max-delay-us", 20_000, "--workers", 2) as server:
        bodies = [pairs_body(ids, id=str(number)) for number, ids in enumerate(requests)]
        answers = asyncio.run(asked_at_once(server, "/v2/models/pairs/infer", bodies))
        calls = server.metric("recstore_model_batch_requests_count")
    for number, (status, document) in enumerate(answers):
        assert (status, document["id"]) == (200, str(number))
        assert document["outputs"][0]["data"] == program(requests[number]).tolist()
    assert calls < len(requests) / 2


@pytest.mark.tier("all")
def test_a_busy_server_refuses_and_goes_on(tmp_path: Path) -> None:
    export(Slow(), (torch.rand(2, 1),), tmp_path / "slow")
    with ServedModel(tmp_path / "slow", "--max-queue", 1, "--max-batch", 1, "--grpc-port", 0) as server:
        bodies = [infer_body(("x", "FP32", torch.rand(1, 1)))] * 8
        answers = asyncio.run(asked_at_once(server, "/v2/models/slow/infer", bodies))
        statuses = [status for status, _ in answers]
        assert statuses.count(200) >= 2, answers
        assert set(statuses) == {200, 503}
        refused = next(document for status, document in answers if status == 503)
        assert refused == {"error": "1 requests wait already: try again later"}
        assert server.metric('outcome="busy"') == statuses.count(503)
        assert server.send("/v2/health/live").status == 200


def test_a_fault_of_the_server_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ModelServer(load_bundle(export(Doubled(), (X,), tmp_path / "model")), "model", ModelServerSettings())

    async def fail() -> None:
        raise LookupError("somewhere inside")

    with pytest.raises(Refusal, match="the server failed; its error stream says why") as refused:
        asyncio.run(server.counted("http", fail))
    assert refused.value.kind is Kind.FAILED
    assert "LookupError: somewhere inside" in capsys.readouterr().err


def test_requests_that_take_too_long_at_the_end_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = export(Doubled(), (X,), tmp_path / "model")
    server = ModelServer(load_bundle(directory), "model", ModelServerSettings())

    async def end() -> tuple[int, str]:
        waiting = asyncio.create_task(server.counted("http", lambda: asyncio.sleep(30)))
        await asyncio.sleep(0.01)
        left = await server.answer_the_rest(0.05)
        with pytest.raises(Refusal) as refused:
            await server.counted("http", lambda: asyncio.sleep(0))
        waiting.cancel()
        return left, str(refused.value)

    assert asyncio.run(end()) == (1, "the server ends")
    assert server.metrics.requests == {("http", "ending"): 1, ("http", "cancelled"): 1}

    monkeypatch.setattr(serving, "serve", lambda *_: 1)
    with pytest.raises(ValueError, match="1 requests were not answered within 10 s"):
        serve_model_command(directory, **vars(ModelServerSettings()))
