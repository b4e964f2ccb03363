"""Handles that leave their process: they mean the table of their name wherever that is open, and no other one ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved_programs
import torch
import warm_processes
from module_kinds import IDS, OFFSETS, Kind, each_kind
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from warm_programs import output_of

from recstore_ops import DistEmbedding, Table
from recstore_ops.ops import operators

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.timeout(300),
    pytest.mark.embedded_only("the processes here have tables of their own"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

ONE = torch.tensor([1])


def in_a_new_process(work: str, argument: Path | int, **environment: str) -> dict[str, Any]:
    """What a function of `saved_programs` gives in a new process."""
    script = Path(saved_programs.__file__)
    done = subprocess.run(
        [sys.executable, script, work, str(argument)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the programs of all kinds gave in another process, at each moment of it."""
    directory = tmp_path_factory.mktemp("programs")
    saved_programs.save_all(directory)
    return warm_processes.in_a_process(saved_programs.run_all, directory)


@pytest.mark.parametrize("moment", ["fresh", "others only", "dropped"])
def test_a_program_whose_table_is_not_there_names_it(moment: str, told: dict[str, dict[str, Any]]) -> None:
    for label, answer in told[moment].items():
        assert isinstance(answer, str), (label, answer)
        assert f'table "{label.partition(".")[0]}"' in answer, (label, answer)


@pytest.mark.parametrize(("moment", "value"), [("another order", 8.0), ("made again", 9.0)])
def test_a_program_reads_the_table_of_its_name(moment: str, value: float, told: dict[str, dict[str, Any]]) -> None:
    assert len(told[moment]) == 3 * len(saved_programs.CASES) + 2
    for label, answer in told[moment].items():
        assert answer in ([value], [2 * value], [value, 2 * value]), (label, answer)


def test_the_error_says_what_to_open(told: dict[str, dict[str, Any]]) -> None:
    assert told["others only"]["kind0.handle"] == (
        'emb_read: table "kind0" is not open in this process; open it first, by a module or make_hashtable of that name'
    )
    assert told["dropped"]["kind0.handle"] == 'emb_read: table "kind0" was dropped'


@pytest.mark.tier("all")
def test_compiled_graphs_of_a_cache_serve_the_tables_of_each_process(tmp_path: Path) -> None:
    answers = [
        in_a_new_process(
            "compile_and_step", before, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_FX_GRAPH_CACHE="1"
        )
        for before in (0, 3)
    ]
    assert answers == [{"out": [[12.0]], "rows": [[-1.0], [1.0]], "others": 0}] * 2


@each_kind
def test_a_trace_that_would_collect_gradients_is_refused(kind: Kind, table_name: Callable[[], str]) -> None:
    module = kind.open(table_name())
    with pytest.raises(RuntimeError, match=r"a program of torch\.jit\.trace collects no gradients") as caught:
        torch.jit.trace(saved_programs.OverTensors(module), (IDS, OFFSETS))
    assert f'table "{module.tables()[0].name}": ' in str(caught.value)


def test_a_constant_list_that_torch_script_emptied_is_refused(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 1)
    traced: Any = torch.jit.trace(
        lambda ids, offsets: operators.emb_bag_tables([table.handle], ids, offsets, [1], operators.SUM)[0],
        (IDS, torch.tensor([0, 3])),
        check_trace=False,
    )
    with pytest.raises(
        RuntimeError, match="emb_bag: table must be a handle, got an undefined tensor, which TorchScript"
    ):
        [traced(IDS, torch.tensor([0, 3])) for _ in range(5)]


def test_a_long_name_is_known_by_its_hash(table_name: Callable[[], str]) -> None:
    start = table_name() + "n" * 200
    handle = operators.make_hashtable(f"{start}/a", 1).clone()
    other = Table(f"{start}/b", 1)
    operators.emb_write(other.handle, ONE, torch.ones(1, 1))
    own = handle.clone()
    handle[0] += 1
    assert operators.emb_read(handle, ONE, 1).ne(1).all()
    operators.hashtable_release(own)
    with pytest.raises(RuntimeError, match=rf'emb_read: table "{start[:60]}n*\.\.\." is not open in this process'):
        operators.emb_read(handle, ONE, 1)


def test_a_handle_is_of_one_length_whatever_the_name(table_name: Callable[[], str]) -> None:
    handles = [operators.make_hashtable(table_name() + "n" * count, 1) for count in (0, 1, 500)]
    assert {handle.shape for handle in handles} == {handles[0].shape}


WRONG_LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "strided": (lambda handle: handle.repeat_interleave(2)[::2], ", not contiguous"),
    "2-D": (lambda handle: handle[None], ""),
    "cut": (lambda handle: handle[:-1], ""),
}


@pytest.mark.parametrize(("change", "words"), WRONG_LAYOUTS.values(), ids=WRONG_LAYOUTS)
def test_a_handle_of_another_layout_is_refused(
    change: Callable[[Tensor], Tensor], words: str, table_name: Callable[[], str]
) -> None:
    handle = change(Table(table_name(), 1).handle)
    expected = rf"a contiguous int64 CPU tensor of shape \[\d+\], got Long of shape \[.*\]{words}$"
    with pytest.raises(RuntimeError, match=f"emb_read: table must be a handle, {expected}"):
        operators.emb_read(handle, ONE, 1)


def test_a_foreign_handle_releases_nothing(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 1)
    foreign = table.handle.clone()
    foreign[0] += 1
    with pytest.raises(RuntimeError, match=f'this handle of table "{table.name}" was released, or comes from another'):
        operators.hashtable_release(foreign)
    assert operators.hashtable_size(foreign) == 0


def test_collected_tables_are_handles(table_name: Callable[[], str]) -> None:
    tables = [Table(table_name(), 1), Table(table_name(), 1)]
    collector = operators.make_collector()
    for table in tables:
        operators.accept_grad(collector, table.handle, ONE, torch.ones(1, 1))
    found = operators.collected_tables(collector)
    assert torch.equal(found, torch.stack([table.handle for table in tables]))
    assert operators.collected_grads(collector, found[1])[1].tolist() == [[1.0]]
    handle = operators.make_hashtable(table_name(), 1)
    operators.clear_grads(collector)
    operators.accept_grad(collector, handle, ONE, torch.ones(1, 1))
    operators.hashtable_release(handle)
    assert operators.collected_tables(collector).eq(0).all()


def read_in_child(calls: list[Callable[[], Tensor]]) -> list[Any]:
    """What calls give in a forked child: values, or the error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps([_told(call) for call in calls]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answers = json.load(pipe)
    os.waitpid(child, 0)
    return answers


def _told(call: Callable[[], Tensor]) -> Any:
    try:
        return call().flatten().tolist()
    except RuntimeError as error:
        return str(error)


def opened(name: str) -> Tensor:
    """The handle of a new table whose row 1 is 5, kept open."""
    handle = operators.make_hashtable(name, 1)
    operators.emb_write(handle, ONE, torch.full((1, 1), 5.0))
    return handle


def test_handles_across_fork_keep_their_tables(table_name: Callable[[], str]) -> None:
    inherited, own, childs = table_name(), table_name(), table_name()
    handle = opened(inherited)
    collector = operators.make_collector()
    same, fresh, fresh_collector = read_in_child(
        [lambda: operators.emb_read(handle, ONE, 1), lambda: opened(childs), operators.make_collector]
    )
    assert same == [5.0]
    opened(own)
    with pytest.raises(RuntimeError, match=f'emb_read: table "{childs}" is not open in this process'):
        operators.emb_read(torch.tensor(fresh), ONE, 1)
    assert torch.tensor(fresh_collector)[0] != operators.make_collector()
    with pytest.raises(RuntimeError, match=r"clear_grads: collector handle .* is unknown, released or of"):
        operators.clear_grads(torch.tensor(fresh_collector[0]))
    operators.clear_grads(collector)


SPAWNED = """
import sys, torch
from recstore_ops import DistEmbedding
from recstore_ops.ops import operators
other = DistEmbedding(4, 1, "other")
handle, collector, prefetch, places = torch.load(sys.argv[1])
ids = torch.tensor([1, 2])
table = DistEmbedding(4, 1, "user", optimizer={"kind": "sgd", "lr": 1.0}, initializer={"kind": "zeros"})
table.weight[[2, 1]] = torch.tensor([[20.0], [10.0]])
assert operators.emb_read(handle, ids, 1).tolist() == [[10.0], [20.0]]
operators.make_collector(), operators.emb_prefetch(table.table.handle, ids)
for call in (lambda: operators.clear_grads(collector), lambda: operators.emb_wait_result(prefetch, 1)):
    try:
        call()
    except RuntimeError as error:
        print(error)
operators.accept_grad(table.table.collector, handle, ids, torch.tensor([[1.0], [2.0]]), None, places)
operators.apply_grads([table.table.collector])
assert table.weight[ids].tolist() == [[9.0], [18.0]]
"""
"""Opens `user`, with its rows in another order, and takes what another process had."""


def test_what_a_pickle_brings_meets_nothing_of_the_new_process(tmp_path: Path) -> None:
    module = DistEmbedding(4, 1, "user")
    module.weight[[1, 2]] = torch.ones(2, 1)
    ids, handle = torch.tensor([1, 2]), module.table.handle
    places = operators.emb_read_places(handle, ids, 1)[1]
    prefetch = operators.emb_prefetch(handle, ids)
    torch.save((handle, module.table.collector, prefetch, places), tmp_path / "brought.pt")
    collector_line, prefetch_line = output_of(SPAWNED, tmp_path / "brought.pt").splitlines()
    assert collector_line.endswith("is unknown, released or of another process")
    assert prefetch_line.endswith(f"prefetch handle {prefetch} is unknown, consumed or dropped")


def test_a_stand_in_is_looked_at_under_fake_tensors(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(4, 1, table_name())
    (stand_in,) = module.parameters()
    with FakeTensorMode() as mode:
        assert mode.from_tensor(stand_in).shape == ()
