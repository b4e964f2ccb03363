"""`KVWorker`: push, pull and wait, over tables in this process and on servers."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_tables import ServerProcesses

from recstore_ops import KVResponse, KVWorker, RecStoreClient, servers

pytestmark = [pytest.mark.tier("test"), pytest.mark.timeout(120)]

TableName = Callable[[], str]
TIMEOUT = 20.0
SUMS = {"kind": "sgd", "lr": 1.0}
"""Rows are the negative sums of what was pushed."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    with ServerProcesses(tmp_path_factory.mktemp("servers"), 2) as processes:
        yield processes


@pytest.fixture(params=["embedded", "servers"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "servers":
        servers.set_ps_servers(request.getfixturevalue("processes").addresses)
    yield request.param
    servers.set_ps_backend("embedded")


@pytest.fixture
def worker(table_name: TableName) -> Iterator[KVWorker]:
    with KVWorker(table_name(), optimizer=SUMS) as worker:
        yield worker


class Hold:
    """Keeps a worker's thread busy within the block."""

    def __init__(self, worker: KVWorker) -> None:
        self._has_begun, self._release = threading.Event(), threading.Event()
        self.timestamp = worker.pull([0], priority=1 << 30, callback=self._wait)
        assert self._has_begun.wait(TIMEOUT)

    def _wait(self, _: KVResponse) -> None:
        self._has_begun.set()
        assert self._release.wait(TIMEOUT)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self._release.set()


@pytest.mark.usefixtures("backend")
def test_a_pull_sees_the_pushes_before_it(table_name: TableName) -> None:
    with KVWorker(table_name(), dim=3, optimizer=SUMS) as worker:
        keys = torch.tensor([9, -(2**63), 4])
        for _ in range(12):
            worker.push(keys, torch.full((3, 3), -1.0))
        pulled = worker.pull(keys)
        assert pulled == 12
        assert torch.equal(worker.wait_rows(pulled, TIMEOUT), torch.full((3, 3), 12.0))
        with pytest.raises(ValueError, match="request 12 has no rows to give: it is a push, out or its callback"):
            worker.wait_rows(pulled)
        both = worker.push_pull([4, 4, 9], -torch.ones(3, 3))
        assert worker.wait_rows(both).tolist() == [[14.0] * 3, [14.0] * 3, [13.0] * 3]
        out = torch.empty(3, 3).T
        worker.wait(worker.pull(keys, out))
        assert out.tolist() == [[13.0] * 3, [12.0] * 3, [14.0] * 3]
        empty = worker.push_pull([], torch.empty(0, 3))
        assert worker.wait_rows(empty).shape == (0, 3)
        assert RecStoreClient().stats(worker.name)["step"] == 14


def test_what_was_pushed_may_be_changed_at_once(worker: KVWorker) -> None:
    keys, vals = torch.tensor([1]), torch.tensor([-1.0])
    with Hold(worker):
        worker.push(keys, vals)
        keys[0], vals[0] = 2, 5.0
    assert worker.wait_rows(worker.pull([1, 2])).flatten().tolist() == [1.0, 0.0]


def test_workers_of_one_app_share_its_table(table_name: TableName) -> None:
    app = table_name()
    with KVWorker(app, optimizer=SUMS) as first, KVWorker(app, optimizer=SUMS) as second:
        first.wait(first.push([1], [-2.0]))
        assert second.wait_rows(second.pull([1])).item() == 2.0
        second.set_learning_rate(0.0)
        assert first.wait_rows(first.push_pull([1], [-2.0])).item() == 2.0
    with pytest.raises(ValueError, match="exists with the configuration"):
        KVWorker(app, optimizer="adam")


def test_higher_priorities_come_first_and_pushes_keep_their_order(worker: KVWorker) -> None:
    order: list[str] = []
    note = lambda name: lambda _: order.append(name)  # noqa: E731
    with Hold(worker):
        worker.pull([1], callback=note("pull 0"))
        worker.push([1], [1.0], priority=-1, callback=note("push -1"))
        worker.push([1], [1.0], priority=5, callback=note("push 5"))
        worker.pull([1], priority=7, callback=note("pull 7"))
        worker.pull([1], callback=note("last pull 0"))
    worker.wait_all(TIMEOUT)
    assert order == ["pull 7", "push -1", "push 5", "pull 0", "last pull 0"]


def test_the_order_is_that_of_a_plain_model(worker: KVWorker) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        model, taken = list[tuple[int, bool, int]](), list[int]()
        note = lambda response: taken.append(response.timestamp)  # noqa: B023, E731
        with Hold(worker):
            for _ in range(30):
                changes, priority = draw.random() < 0.5, draw.randrange(-2, 3)
                if changes:
                    timestamp = worker.push([1], [1.0], priority, note)
                else:
                    timestamp = worker.pull([1], priority=priority, callback=note)
                model.append((timestamp, changes, priority))
        worker.wait_all(TIMEOUT)
        assert taken == [next_of(model) for _ in range(30)]


def next_of(model: list[tuple[int, bool, int]]) -> int:
    highest = max(priority for *_, priority in model)
    first = next(entry for entry in model if entry[2] == highest)
    taken = next(entry for entry in model if entry[1]) if first[1] else first
    model.remove(taken)
    return taken[0]


def test_what_finds_no_room_waits_and_is_then_refused_with_the_limit(table_name: TableName) -> None:
    with KVWorker(table_name(), optimizer=SUMS, max_pending=2, max_pending_bytes=64, issue_timeout=0.05) as worker:
        with Hold(worker):
            worker.push([1], [1.0])
            with pytest.raises(TimeoutError) as full:
                worker.push([1], [1.0])
        assert str(full.value) == ("push: max_pending is 2, of which 2 are pending: no room for 1 more within 0.05 s")
        worker.wait_all(TIMEOUT)
        with pytest.raises(ValueError, match="push_pull: a request of 96 bytes exceeds max_pending_bytes, 64"):
            worker.push_pull([1] * 6, [1.0] * 6)
        rows = worker.pull([1] * 4)
        worker.wait_all(TIMEOUT)
        with pytest.raises(
            TimeoutError, match=r"max_pending_bytes is 64, of which 16 are pending: no room for 60 more"
        ):
            worker.push([1] * 5, [1.0] * 5)
        assert worker.wait_rows(rows).flatten().tolist() == [-1.0] * 4
        worker.push([1] * 5, [1.0] * 5)


def test_a_push_goes_on_as_soon_as_there_is_room(table_name: TableName) -> None:
    with KVWorker(table_name(), optimizer=SUMS, max_pending=1) as worker:
        for _ in range(50):
            worker.push([1], [-1.0])
        assert worker.wait_rows(worker.pull([1])).item() == 50.0


def test_a_wait_has_an_end_and_the_request_goes_on(worker: KVWorker) -> None:
    with Hold(worker) as hold:
        pushed = worker.push([1], [-1.0])
        with pytest.raises(
            TimeoutError, match=rf"request {pushed} did not finish within 0\.0\d+ s; 2 requests are pending"
        ):
            worker.wait(pushed, 0.05)
        with pytest.raises(TimeoutError, match=rf"request {hold.timestamp} did not finish"):
            worker.wait_all(0.05)
        assert worker.num_pending() == 2
    worker.wait(pushed, TIMEOUT)
    worker.wait(pushed)
    assert worker.wait_rows(worker.pull([1])).item() == 1.0
    with pytest.raises(ValueError, match="request 99 was never issued"):
        worker.wait(99)
    with pytest.raises(ValueError, match="request -1 was never issued"):
        worker.wait(-1)


@pytest.mark.usefixtures("backend")
def test_errors_go_to_whoever_waits_to_the_callback_and_to_the_wait_for_all(table_name: TableName) -> None:
    with KVWorker(table_name(), optimizer=SUMS) as worker:
        told: list[KVResponse] = []
        first, second, third = (worker.push([5], [float("nan")]) for _ in range(3))
        fourth = worker.push([5], [float("inf")], callback=told.append)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"gradient of id 5 at position 0 of table .* holds NaN"):
                worker.wait(first)
        with pytest.raises(RuntimeError, match="holds inf"):
            worker.wait(fourth)
        assert [(response.timestamp, response.rows) for response in told] == [(fourth, None)]
        assert "holds inf" in str(told[0].error)
        with pytest.raises(RuntimeError, match=r"holds NaN.*\(and 1 more requests failed\)"):
            worker.wait_all()
        worker.wait_all()
        for timestamp in (second, third):
            with pytest.raises(RuntimeError, match="holds NaN"):
                worker.wait(timestamp)
        assert RecStoreClient().stats(worker.name)["rows"] == 0


def test_closing_finishes_what_is_pending_and_raises_what_nobody_was_told_of(table_name: TableName) -> None:
    worker = KVWorker(table_name(), optimizer=SUMS)
    with Hold(worker):
        worker.push([1], [-1.0])
        worker.push([1], [float("nan")])
    with pytest.raises(RuntimeError, match="holds NaN"):
        worker.close()
    worker.close()
    assert RecStoreClient().pull(worker.name, torch.tensor([1])).item() == 1.0
    with pytest.raises(RuntimeError, match="push: the requests were closed"):
        worker.push([1], [1.0])


def test_a_worker_that_is_forgotten_finishes_and_warns_of_failures(table_name: TableName) -> None:
    worker = KVWorker(table_name(), optimizer=SUMS)
    name, forgotten = worker.name, weakref.ref(worker)
    worker.push([1], [-1.0])
    worker.push([1], [float("nan")])
    owners = [worker]
    del worker
    with pytest.warns(RuntimeWarning, match=r"request 1 failed, and nobody was told: .* holds NaN"):
        owners.clear()
    gc.collect()
    assert forgotten() is None
    assert RecStoreClient().pull(name, torch.tensor([1])).item() == 1.0


def test_callbacks_get_rows_and_their_exceptions_are_warned_of_and_raised(worker: KVWorker) -> None:
    responses: list[KVResponse] = []
    pulled = worker.push_pull([1], [-1.0], callback=responses.append)
    out = torch.zeros(1, 1)
    into = worker.pull([1], out, callback=responses.append)
    worker.wait_all(TIMEOUT)
    assert [response.timestamp for response in responses] == [pulled, into]
    assert responses[0].rows is not None
    assert responses[0].rows.item() == 1.0
    assert responses[1].rows is out

    def fail(_: KVResponse) -> None:
        raise KeyError("no rows, please")

    with pytest.warns(RuntimeWarning, match=r"request 2: its callback raised KeyError\('no rows, please'\)"):
        failed = _failure_of(worker, worker.pull([1], callback=fail))
    assert isinstance(failed, KeyError)
    assert worker.wait_rows(worker.pull([1])).item() == 1.0


def _failure_of(worker: KVWorker, timestamp: int) -> BaseException:
    with pytest.raises(BaseException) as failed:  # noqa: PT011
        worker.wait(timestamp, TIMEOUT)
    return failed.value


def test_a_callback_may_issue_requests_and_is_refused_what_would_wait_for_itself(table_name: TableName) -> None:
    seen: list[str] = []
    with KVWorker(table_name(), optimizer=SUMS, max_pending=2) as worker:

        def issue(_: KVResponse) -> None:
            pushed = worker.push([1], [-1.0])
            for call in (lambda: worker.wait(pushed), lambda: worker.push([1], [1.0])):
                try:
                    call()
                except (RuntimeError, TimeoutError) as error:
                    seen.append(str(error))

        worker.wait(worker.pull([1], callback=issue), TIMEOUT)
        worker.wait_all(TIMEOUT)
        assert worker.wait_rows(worker.pull([1])).item() == 1.0
    assert seen == [
        "request 1 cannot finish while a callback waits for it",
        "push: max_pending is 2, of which 2 are pending: no room for 1 more within 0 s",
    ]


BAD: list[tuple[Callable[[KVWorker], object], type[Exception], str]] = [
    (
        lambda worker: worker.push([1, 2], torch.ones(1, 2)),
        ValueError,
        r"push: vals of table .* must be \[2, 2\], got \[1, 2\]",
    ),
    (lambda worker: worker.push([1], torch.ones(1, 2).double()), TypeError, "vals of table .* must be float32"),
    (lambda worker: worker.push(torch.ones(1), torch.ones(1, 2)), TypeError, "ids must be int64"),
    (
        lambda worker: worker.pull(torch.ones(1, 1).long()),
        ValueError,
        r"pull: keys of table .* must be \[n\], got \[1, 1\]",
    ),
    (lambda worker: worker.pull([1], torch.empty(2)), ValueError, r"out for table .* must be \[1, 2\], got \[2\]"),
    (lambda worker: worker.pull([1], torch.empty(1, 2).long()), TypeError, "out for table .* must be float32"),
    (lambda worker: worker.pull([1], torch.empty(1, 2, requires_grad=True)), ValueError, "must not require a gradient"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_arguments_are_refused_at_once(
    table_name: TableName, call: Callable[[KVWorker], object], error: type[Exception], message: str
) -> None:
    with KVWorker(table_name(), dim=2) as worker:
        with pytest.raises(error, match=message):
            call(worker)
        assert worker.num_pending() == 0


@pytest.mark.parametrize("priority", [-(2**31) - 1, 2**31])
def test_a_priority_out_of_its_range_is_refused(worker: KVWorker, priority: int) -> None:
    with pytest.raises(ValueError, match=rf"pull: priority must be from -2\*\*31 to 2\*\*31 - 1, got {priority}"):
        worker.pull([1], priority=priority)
    assert worker.num_pending() == 0


def test_a_wait_ends_at_an_interrupt_and_the_request_goes_on(worker: KVWorker) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with Hold(worker):
            pushed = worker.push([1], [-1.0])
            threading.Timer(0.2, signal.raise_signal, [signal.SIGUSR1]).start()
            with pytest.raises(KeyboardInterrupt):
                worker.wait(pushed)
    finally:
        signal.signal(signal.SIGUSR1, before)
    worker.wait(pushed, TIMEOUT)


def test_a_dropped_table_is_named(table_name: TableName) -> None:
    with KVWorker(table_name(), optimizer=SUMS) as worker:
        with Hold(worker):
            pushed, pulled = worker.push([1], [1.0]), worker.pull([1])
            RecStoreClient().drop(worker.name)
        for timestamp, operation in ((pushed, "emb_update"), (pulled, "emb_read")):
            with pytest.raises(RuntimeError, match=rf'^{operation}: table "{worker.name}" was dropped'):
                worker.wait(timestamp, TIMEOUT)


def test_a_key_out_of_the_bound_is_an_index_error(table_name: TableName) -> None:
    with KVWorker(table_name(), num_embeddings=4) as worker:
        for timestamp in (worker.push([4], [1.0]), worker.pull([4])):
            with pytest.raises(IndexError, match="id 4 at position 0"):
                worker.wait(timestamp, TIMEOUT)


@pytest.mark.parametrize("limit", ["max_pending", "max_pending_bytes", "issue_timeout"])
def test_a_limit_must_be_positive(table_name: TableName, limit: str) -> None:
    limits: dict[str, Any] = {limit: 0}
    with pytest.raises(ValueError, match=f"{limit} must be positive, got 0"):
        KVWorker(table_name(), **limits)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_not_hang(worker: KVWorker) -> None:
    for _ in range(5):
        for _ in range(50):
            worker.push([1], [-1.0])
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(_calls_refused(worker))
        assert os.waitpid(child, 0)[1] == 0
    assert worker.wait_rows(worker.pull([1])).item() == 250.0


def _calls_refused(worker: KVWorker) -> int:
    calls = [lambda: worker.push([1], [1.0]), lambda: worker.wait(0), worker.wait_all, worker.num_pending, worker.close]
    refused = 0
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            refused += "the requests of a forked process are its parent's" in str(error)
    return len(calls) - refused


def test_a_silent_server_is_named_and_the_worker_goes_on(tmp_path: Path, table_name: TableName) -> None:
    with ServerProcesses(tmp_path, 1) as processes:
        servers.set_ps_servers(processes.addresses, timeout=0.5)
        try:
            with KVWorker(table_name(), optimizer=SUMS) as worker:
                worker.wait(worker.push([1], [1.0]))
                processes.stop()
                pushed, pulled = worker.push([1], [1.0]), worker.pull([1])
                for timestamp in (pushed, pulled):
                    with pytest.raises(RuntimeError, match=f"shard 0 at {processes.addresses[0]} is unavailable"):
                        worker.wait(timestamp)
        finally:
            servers.set_ps_backend("embedded")
