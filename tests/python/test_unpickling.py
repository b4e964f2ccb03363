"""Whole modules that are saved: read where their tables are open, and refused where that would make up rows."""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from module_kinds import DIM, KINDS, NUM, OPTIONS, Kind, each_kind
from torch import nn
from torch.utils.data import DataLoader, Dataset
from warm_programs import output_of

from recstore_ops import (
    DistEmbedding,
    DistTensor,
    RecStoreClient,
    Table,
    checkpoint,
    opening_empty_tables,
    table_names,
)

pytestmark = pytest.mark.tier("test")


def torch_saved(module: Any) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def torch_loaded(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=False)


WAYS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "pickle": (pickle.dumps, pickle.loads),
    "torch.save": (torch_saved, torch_loaded),
}

each_way = pytest.mark.parametrize("way", WAYS)


def filled(kind: Kind, name: str, value: float = 7.0) -> Any:
    module = kind.open(name)
    weight = DistTensor.over(module.tables()[0], (NUM, DIM))
    weight[list(range(NUM))] = torch.full((NUM, DIM), value)
    return module


def refusal(kind: Kind, name: str) -> str:
    owner = {"RecStoreEmbeddingBagCollection": "DistEmbeddingBag", "RecStoreEmbeddingCollection": "DistEmbedding"}
    opened = next(title for title, each in KINDS.items() if each is kind).removesuffix(", not fused")
    return (
        f'{owner.get(opened, opened)} over table "{name}" cannot be unpickled: the table is not open in this process '
        "and a pickle holds no rows; load them first, by recstore_ops.checkpoint.load, or make the module and load its "
        "state_dict, or unpickle within recstore_ops.opening_empty_tables() to begin with initial values"
    )


@each_kind
@each_way
def test_a_pickle_shares_the_table_that_is_open(kind: Kind, way: str, table_name: Callable[[], str]) -> None:
    module = filled(kind, table_name())
    save, load = WAYS[way]
    [other] = load(save(nn.Sequential(module)))
    assert other.tables()[0].table_id == module.tables()[0].table_id
    assert torch.equal(kind.outputs(other), kind.outputs(module))


@each_kind
@each_way
def test_a_pickle_that_would_make_a_table_is_refused(kind: Kind, way: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    save, load = WAYS[way]
    saved = save(nn.Sequential(filled(kind, name)))
    RecStoreClient().drop(name)
    with pytest.raises(RuntimeError) as caught:
        load(saved)
    assert str(caught.value) == refusal(kind, name)
    assert name not in table_names()
    with opening_empty_tables():
        [module] = load(saved)
    assert len(module.tables()[0]) == 0
    assert torch.equal(kind.outputs(module), torch.zeros_like(kind.outputs(module)))


@pytest.mark.parametrize("kept", ["weight", "DistTensor", "Table"])
def test_what_modules_are_made_of_is_refused_too(kept: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    values: dict[str, Callable[[], Any]] = {
        "weight": lambda: DistEmbedding(NUM, DIM, name).weight,
        "DistTensor": lambda: DistTensor((NUM, DIM), torch.float32, name, persistent=True),
        "Table": lambda: Table(name, DIM),
    }
    saved = pickle.dumps(values[kept]())
    RecStoreClient().drop(name)
    with pytest.raises(RuntimeError, match=re.escape(f'over table "{name}" cannot be unpickled')):
        pickle.loads(saved)
    assert name not in table_names()
    with opening_empty_tables():
        pickle.loads(saved)
    assert name in table_names()


def test_a_frozen_table_of_pretrained_rows_does_not_come_back_random(table_name: Callable[[], str]) -> None:
    name = table_name()
    saved = pickle.dumps(DistEmbedding.from_pretrained(torch.full((2, 2), 9.0), name))
    RecStoreClient().drop(name)
    with pytest.raises(RuntimeError, match="cannot be unpickled"):
        pickle.loads(saved)


def collection_pickle(names: list[str]) -> bytes:
    return pickle.dumps(nn.Sequential(*[DistEmbedding(NUM, DIM, name, **OPTIONS) for name in names]))


def test_a_pickle_that_is_refused_leaves_no_table_behind(table_name: Callable[[], str]) -> None:
    first, second = table_name(), table_name()
    saved = collection_pickle([first, second])
    for name in (first, second):
        RecStoreClient().drop(name)
    DistEmbedding(NUM, DIM + 1, second)
    with pytest.raises(ValueError, match="exists with the configuration"), opening_empty_tables():
        pickle.loads(saved)
    assert first not in table_names()
    assert second in table_names()


def test_it_is_about_the_thread_that_says_so(table_name: Callable[[], str]) -> None:
    name = table_name()
    saved = collection_pickle([name])
    RecStoreClient().drop(name)
    errors: list[Exception] = []

    def load() -> None:
        try:
            pickle.loads(saved)
        except RuntimeError as error:
            errors.append(error)

    with opening_empty_tables():
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert [name in str(error) for error in errors] == [True]


def test_a_module_made_from_a_pickle_has_a_padding_row_and_one_copied_leaves_it(table_name: Callable[[], str]) -> None:
    name = table_name()
    module = DistEmbedding(NUM, DIM, name, padding_idx=2)
    saved = pickle.dumps(module)
    module.weight[[2]] = torch.ones(1, DIM)
    assert copy.copy(module).weight[[2]].eq(1).all()
    assert pickle.loads(saved).weight[[2]].eq(1).all()
    RecStoreClient().drop(name)
    with opening_empty_tables():
        assert pickle.loads(saved).weight[[2]].eq(0).all()


@each_kind
def test_a_shallow_copy_shares_the_table(kind: Kind, table_name: Callable[[], str]) -> None:
    module = filled(kind, table_name())
    other = copy.copy(module)
    assert other.tables()[0].table_id == module.tables()[0].table_id
    assert torch.equal(kind.outputs(other), kind.outputs(module))


IN_ANOTHER_PROCESS = """
import json, pickle, sys, torch
from recstore_ops import *
from recstore_ops import checkpoint
said = {}
files, directory = json.loads(sys.argv[1]), sys.argv[2]
def load(file):
    return torch.load(file, weights_only=False)
for kind, file in files.items():
    try:
        load(file)
    except RuntimeError as error:
        said[kind] = str(error)
assert table_names() == [], table_names()
checkpoint.load(directory)
rows = {kind: load(file).tables()[0] for kind, file in files.items()}
values = {kind: torch.ops.recstore.emb_read.table(table.handle, torch.arange(5), 2).unique().tolist()
          for kind, table in rows.items()}
print(json.dumps([said, values]))
"""


@pytest.mark.embedded_only("tables on servers are there in every process")
def test_another_process_is_told_what_to_load_first(table_name: Callable[[], str], tmp_path: Path) -> None:
    names = {title: table_name() for title in KINDS}
    modules = {title: filled(KINDS[title], name) for title, name in names.items()}
    files = {title: str(tmp_path / f"{place}.pt") for place, title in enumerate(names)}
    for title, module in modules.items():
        torch.save(module, files[title])
    checkpoint.save(tmp_path / "tables")
    said, values = json.loads(output_of(IN_ANOTHER_PROCESS, json.dumps(files), tmp_path / "tables"))
    assert said == {title: refusal(KINDS[title], name) for title, name in names.items()}
    assert values == {title: [7.0] for title in names}


class Looked(Dataset[Any]):
    """Rows that a worker looks up."""

    def __init__(self, module: Any, kind: str) -> None:
        self.module = module
        self.kind = kind

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> Any:
        with torch.no_grad():
            return KINDS[self.kind].outputs(self.module)


@pytest.mark.embedded_only("a process that is started anew chooses servers itself")
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_is_started_anew_does_not_make_up_rows(
    kind: str, start: str, table_name: Callable[[], str]
) -> None:
    name = table_name()
    rows = Looked(filled(KINDS[kind], name), kind)
    message = re.escape(f'over table "{name}" cannot go to a process that is started by spawn or forkserver: its rows')
    with pytest.raises(RuntimeError, match=message):
        list(DataLoader(rows, num_workers=1, multiprocessing_context=start))
    context: Any = multiprocessing.get_context(start)
    process = context.Process(target=len, args=(rows,))
    with pytest.raises(RuntimeError, match=message):
        process.start()


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_worker_reads_the_rows_of_its_parent(kind: str, table_name: Callable[[], str]) -> None:
    module = filled(KINDS[kind], table_name())
    [read] = DataLoader(Looked(module, kind), num_workers=1, multiprocessing_context="fork")
    assert torch.equal(read.squeeze(0), KINDS[kind].outputs(module).detach())


@pytest.mark.embedded_only("a process that is started anew chooses servers itself")
def test_no_tensor_or_table_goes_to_a_process_that_is_started_anew(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name())
    tensor = DistTensor((NUM, DIM), torch.float32, table_name())
    for value in (module.table, module.weight, tensor):
        process = multiprocessing.get_context("spawn").Process(target=print, args=(value,))
        with pytest.raises(RuntimeError, match="cannot go to a process that is started by spawn or forkserver"):
            process.start()
