"""Forking while threads read and update: a child reads what its parent had and may change only tables of its own.

Every wait has an end, so that a child that hangs fails its test.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from queue import Queue

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from warm_programs import run_program

import recstore_ops
from recstore_ops import DistEmbedding, DistTensor, SparseOptimizer, get_kv_client
from recstore_ops.ops import operators

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.timeout(120),
    # Python warns of a fork with threads at work, which is what these tests are about.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

DIM = 4
IDS = torch.arange(8)
ROWS = torch.arange(8.0)[:, None].expand(8, DIM)
TIMEOUT = 30
"""Seconds that a child may take."""

FORKS = 10
"""How often a test forks: the threads of the parent are somewhere else each time."""


def open_module(name: str) -> DistEmbedding:
    return DistEmbedding(None, DIM, name, optimizer={"kind": "adagrad", "lr": 0.1})


@pytest.fixture
def module(table_name: Callable[[], str]) -> DistEmbedding:
    """A module whose table has the rows `ROWS` at `IDS`."""
    module = open_module(table_name())
    module.weight[IDS] = ROWS
    return module


class Worker(threading.Thread):
    """Opens and trains a table on ids far from `IDS`, in batches that the store shares over threads, until stopped."""

    def __init__(self, module: DistEmbedding) -> None:
        super().__init__(daemon=True)
        self.module, self.stopped, self.failures = module, threading.Event(), Queue[BaseException]()

    def run(self) -> None:
        own = open_module(self.module.name)
        optimizer = SparseOptimizer(modules=[own])
        try:
            while not self.stopped.is_set():
                open_module(self.module.name)
                own(torch.randint(1000, 20_000, (5000,))).sum().backward()
                optimizer.step()
        except BaseException as failure:
            self.failures.put(failure)


@pytest.fixture
def workers(module: DistEmbedding) -> Iterator[list[Worker]]:
    """Two threads that train the module's table meanwhile."""
    workers = [Worker(module) for _ in range(2)]
    for worker in workers:
        worker.start()
    yield workers
    for worker in workers:
        worker.stopped.set()
        worker.join(TIMEOUT)
        assert not worker.is_alive()
        assert worker.failures.empty()


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a forked child and fails if it fails, crashes or hangs there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        report = ""
        try:
            work()
        except BaseException:
            report = traceback.format_exc()
        os.write(writing, report.encode()[-60_000:])
        os._exit(0 if not report else 1)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], TIMEOUT)
    if not ready:
        os.kill(child, signal.SIGKILL)
    report = os.read(reading, 65_536).decode() if ready else f"the child hung for {TIMEOUT} s"
    os.close(reading)
    _, status = os.waitpid(child, 0)
    assert report == ""
    assert status == 0


def rows_of(module: DistEmbedding) -> Tensor:
    with torch.no_grad():
        return module(IDS)


def expect_rows(module: DistEmbedding) -> None:
    assert torch.equal(rows_of(module), ROWS)


def step_of(module: DistEmbedding) -> None:
    # Not by backward: a child has no autograd once its parent had autograd's threads.
    operators.accept_grad(module.table.collector, module.table.handle, IDS, torch.ones(len(IDS), DIM))
    SparseOptimizer(modules=[module]).step()


def insert_into(module: DistEmbedding) -> None:
    operators.hashtable_lookup(module.table.handle, torch.tensor([99]), DIM, True)


CHANGES: dict[str, Callable[[DistEmbedding], object]] = {
    "emb_write": lambda module: module.weight.__setitem__(IDS, ROWS + 1),
    "emb_update": lambda module: operators.emb_update(module.table.handle, IDS, ROWS),
    "emb_update: step": step_of,
    "hashtable_delete": lambda module: get_kv_client().delete(module.name, IDS),
    "hashtable_clear": lambda module: operators.hashtable_clear(module.table.handle),
    "hashtable_lookup": insert_into,
    "set_learning_rate": lambda module: get_kv_client().set_learning_rate(module.name, 0.5),
    "set_learning_rate: optimizer": lambda module: SparseOptimizer(lr=0.5, modules=[module]),
    "drop_table": lambda module: get_kv_client().drop(module.name),
}


def test_a_child_reads_the_rows_of_its_parent(module: DistEmbedding, workers: list[Worker]) -> None:
    many = torch.arange(20_000)

    def read() -> None:
        expect_rows(module)
        expect_rows(open_module(module.name))
        assert torch.equal(module(many)[:8], ROWS)
        assert torch.equal(get_kv_client().pull(module.name, IDS), ROWS)

    for _ in range(FORKS):
        in_child(read)


@pytest.mark.parametrize("change", CHANGES)
def test_a_child_is_refused_every_change_of_its_parents_table(
    change: str, module: DistEmbedding, workers: list[Worker]
) -> None:
    operation = change.partition(":")[0]
    expected = f'{operation}: table "{module.name}" belongs to the parent of this forked process'

    def refuse() -> None:
        with pytest.raises(RuntimeError) as caught:
            CHANGES[change](module)
        assert str(caught.value).startswith(expected)
        assert "would be lost" in str(caught.value)
        expect_rows(module)

    in_child(refuse)
    expect_rows(module)


def test_a_child_trains_a_table_of_its_own(
    module: DistEmbedding, workers: list[Worker], table_name: Callable[[], str]
) -> None:
    name = table_name()

    def train() -> None:
        # Threads that libtorch started for its own operators are gone in a child: one does, as in a DataLoader.
        torch.set_num_threads(1)
        own = open_module(name)
        own.weight[IDS] = ROWS
        step_of(own)
        assert torch.allclose(rows_of(own), ROWS - 0.1)
        operators.emb_update(own.table.handle, torch.arange(20_000), torch.ones(20_000, DIM))
        assert len(own.table) == 20_000
        get_kv_client().drop(name)

    for _ in range(FORKS):
        in_child(train)
    assert name not in recstore_ops.table_names()


def test_a_grandchild_reads_its_parents_table_and_may_not_change_it(
    module: DistEmbedding, workers: list[Worker], table_name: Callable[[], str]
) -> None:
    def fork_again() -> None:
        own = open_module(table_name())
        own.weight[IDS] = ROWS

        def refuse() -> None:
            expect_rows(module)
            expect_rows(own)
            with pytest.raises(RuntimeError, match="belongs to the parent"):
                own.weight[IDS] = ROWS + 1

        in_child(refuse)
        own.weight[IDS] = ROWS + 1

    in_child(fork_again)


def test_a_parent_goes_on_while_it_forks(module: DistEmbedding, workers: list[Worker]) -> None:
    before = module.table.statistics()["step"]
    for count in range(1, FORKS + 1):
        in_child(lambda: expect_rows(module))
        operators.emb_update(module.table.handle, torch.tensor([500]), torch.ones(1, DIM))
        assert module.table.statistics()["step"] >= before + count
    assert all(worker.is_alive() for worker in workers)


def test_gradients_collected_before_a_fork_stay_the_parents(module: DistEmbedding) -> None:
    module(IDS).sum().backward()

    def refuse() -> None:
        assert len(module._trace) == 1
        with pytest.raises(RuntimeError, match="belongs to the parent"):
            SparseOptimizer(modules=[module]).step()
        module.reset_trace()

    in_child(refuse)

    SparseOptimizer(modules=[module]).step()
    assert torch.allclose(rows_of(module), ROWS - 0.1)


def read_in_process(module: DistEmbedding, answers: multiprocessing.SimpleQueue[object]) -> None:
    answers.put(rows_of(module).tolist())
    try:
        step_of(module)
    except RuntimeError as error:
        answers.put(str(error))


def test_a_process_forked_by_multiprocessing_reads_and_is_refused_a_step(
    module: DistEmbedding, workers: list[Worker]
) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=read_in_process, args=(module, answers))

    process.start()
    process.join(TIMEOUT)

    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0
    assert answers.get() == ROWS.tolist()
    assert str(answers.get()).startswith("emb_update: table")


class RowsOfIds(Dataset[tuple[int, Tensor]]):
    """Ids and, looked up where the item is made, their rows."""

    def __init__(self, module: DistEmbedding) -> None:
        self.module = module

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        with torch.no_grad():
            return index, self.module(torch.tensor(index))


def test_the_workers_of_a_data_loader_read_rows(module: DistEmbedding, workers: list[Worker]) -> None:
    loader = DataLoader(RowsOfIds(module), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=TIMEOUT)
    for _ in range(2):
        batches = list(loader)
        assert torch.equal(torch.cat([ids for ids, _ in batches]), IDS)
        assert torch.equal(torch.cat([rows for _, rows in batches]), ROWS)


def test_a_child_that_lets_go_of_a_tensor_leaves_it_to_its_parent(
    table_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [DistTensor((8, DIM), torch.float32, table_name())]
    kept[0][IDS] = ROWS

    def let_go() -> None:
        failures: list[object] = []
        monkeypatch.setattr(sys, "unraisablehook", failures.append)
        kept.clear()
        assert failures == []

    in_child(let_go)
    assert torch.equal(kept[0][IDS], ROWS)


def test_a_child_that_exits_as_usual_says_nothing_and_leaves_the_rows() -> None:
    script = """
        import os, sys, torch
        from recstore_ops import DistEmbedding, DistTensor
        module = DistEmbedding(None, 2, "rows")
        tensor = DistTensor((3, 2), torch.float32, "matrix")
        module.weight[[1]] = torch.ones(1, 2)
        child = os.fork()
        if child == 0:
            module(torch.tensor([1])).sum().backward()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(len(module.table), len(tensor))
    """
    done = run_program(textwrap.dedent(script), warns="ignore")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 3\n", "")
