"""Pickles of `SparseOptimizer`, alone and with the model, as those of the optimizers of torch."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from module_kinds import DIM, IDS, LR, NUM, OPTIONS, Kind, each_kind
from torch import nn

from recstore_ops import (
    DistEmbedding,
    RecStoreClient,
    SparseOptimizer,
    checkpoint,
    table_statistics,
)

pytestmark = pytest.mark.tier("test")

ADAM: dict[str, Any] = {"initializer": "zeros", "optimizer": {"kind": "adam", "lr": 0.125}}


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": by_torch,
    "copy.copy of the optimizer": lambda pair: (pair[0], copy.copy(pair[1])),
}
each_way = pytest.mark.parametrize("way", WAYS)


def rows_of(kind: Kind, module: Any) -> torch.Tensor:
    with torch.no_grad():
        return kind.outputs(module).clone()


@each_way
@each_kind
def test_a_model_and_its_optimizer_go_on_together(kind: Kind, way: str, table_name: Callable[[], str]) -> None:
    module = kind.open(table_name())
    optimizer = SparseOptimizer(modules=[module])
    kind.outputs(module).sum().backward()
    optimizer.step()
    before = rows_of(kind, module)
    again, loaded = WAYS[way]((module, optimizer))
    kind.outputs(again).sum().backward()
    loaded.step()
    assert not torch.equal(rows_of(kind, again), before)
    assert torch.equal(rows_of(kind, again), rows_of(kind, module))  # One table.
    stepped = rows_of(kind, again)
    kind.outputs(again).sum().backward()
    loaded.zero_grad()
    loaded.step()
    assert torch.equal(rows_of(kind, again), stepped)


def test_an_optimizer_alone_brings_modules_of_its_own(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    loaded = by_torch(SparseOptimizer(modules=[module]))
    module(IDS).sum().backward()
    loaded.step()  # As in torch: of its own copies, which collected nothing.
    assert module(IDS).eq(0).all()
    loaded.step([module])
    assert module.weight[[1]].eq(-LR).all()
    assert loaded.state_dict()["state"].keys() == {module.name}


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_groups_rates_and_slots_are_as_before(way: str, table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **ADAM)
    optimizer = SparseOptimizer(modules=[module], lr=0.5)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.param_groups[0]["name"] = "rows"
    for _ in range(2):
        module(IDS).sum().backward()
        optimizer.step()
    again, loaded = WAYS[way]((module, optimizer))
    assert [{**group, "params": []} for group in loaded.param_groups] == [
        {**group, "params": []} for group in optimizer.param_groups
    ]
    ours, theirs = loaded.state_dict()["state"][module.name], optimizer.state_dict()["state"][module.name]
    assert torch.equal(ours[1]["exp_avg"], theirs[1]["exp_avg"])
    assert ours[2] == theirs[2]
    loaded.param_groups[0]["lr"] = 0.0625
    again(IDS).sum().backward()
    loaded.step()
    assert table_statistics(module.name)["learning_rate"] == 0.0625
    assert table_statistics(module.name)["step"] == 3
    assert repr(loaded).startswith("SparseOptimizer")


def test_the_optimizer_that_a_model_holds_is_that_of_the_loaded_one(table_name: Callable[[], str]) -> None:
    model: Any = nn.Sequential(DistEmbedding(NUM, DIM, table_name(), **OPTIONS))
    model.__dict__["optimizer"] = SparseOptimizer(modules=[model])
    again = by_torch(model)
    again(IDS).sum().backward()
    again.optimizer.zero_grad()
    again.optimizer.step()
    assert again(IDS).eq(0).all()
    again(IDS).sum().backward()
    again.optimizer.step()
    assert again[0].weight[[1]].eq(-LR).all()


def test_a_scheduler_goes_with_its_optimizer(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    optimizer = SparseOptimizer(modules=[module])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    again, loaded, schedule = pickle.loads(pickle.dumps((module, optimizer, scheduler)))
    assert schedule.optimizer is loaded
    again(IDS).sum().backward()
    loaded.step()
    schedule.step()
    assert loaded.param_groups[0]["lr"] == LR / 2


def test_one_without_modules_and_one_of_a_client_are_read(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    for optimizer in (SparseOptimizer(), SparseOptimizer(RecStoreClient(), lr=0.5)):
        module(IDS).sum().backward()
        optimizer.step([module])
        loaded = pickle.loads(pickle.dumps(optimizer))
        loaded.param_groups[0]["lr"] = 0.25
        module(IDS).sum().backward()
        loaded.step([module])
        assert table_statistics(module.name)["learning_rate"] == 0.25


def test_hooks_stay_with_the_original_as_in_torch(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    optimizer, called = SparseOptimizer(modules=[module]), []
    optimizer.register_step_pre_hook(lambda *args: called.append(1))
    again, loaded = by_torch((module, optimizer))
    again(IDS).sum().backward()
    loaded.step()
    assert called == []


def test_a_dense_optimizer_beside_a_loaded_one_is_told_of_no_rows(
    table_name: Callable[[], str], recwarn: pytest.WarningsRecorder
) -> None:
    model: Any = nn.Sequential(DistEmbedding(NUM, DIM, table_name(), **OPTIONS), nn.Linear(DIM, 1))
    model, optimizer = pickle.loads(pickle.dumps((model, SparseOptimizer(modules=[model]))))
    dense = torch.optim.SGD(model.parameters(), lr=1.0)
    model(IDS).sum().backward()
    dense.step()
    optimizer.step()
    assert not [each for each in recwarn if "torch.optim" in str(each.message)]


PROGRAM = """
import sys, torch
from recstore_ops import checkpoint, table_statistics
checkpoint.load(sys.argv[1] + "/tables")
model, optimizer = torch.load(sys.argv[1] + "/all.pt", weights_only=False)
model(torch.tensor([1, 2])).sum().backward()
optimizer.step()
print(table_statistics("pickled")["step"], model.weight[[1]].tolist())
"""


@pytest.mark.embedded_only("the other process would have the tables of this one")
def test_another_process_goes_on_with_the_tables_of_a_checkpoint(tmp_path: Path) -> None:
    module = DistEmbedding(NUM, DIM, "pickled", **ADAM, on_existing="reset")
    optimizer = SparseOptimizer(modules=[module])
    for step in range(3):
        if step == 2:
            torch.save((module, optimizer), tmp_path / "all.pt")
            checkpoint.save(tmp_path / "tables")
        module(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert found.stdout == f"3 {module.weight[[1]].tolist()}\n", found.stderr
