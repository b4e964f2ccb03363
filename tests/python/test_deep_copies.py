"""A deep copy of a module owns its rows and optimizer state, under a name of its own, and goes with its last owner."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import DIM, IDS, NUM, OPTIONS, Kind, Pair, each_kind, pair
from optimizer_kinds import KINDS
from torch import Tensor, nn

from recstore_ops import (
    DistEmbedding,
    DistTensor,
    HashTable,
    HashTableRegister,
    RecStoreClient,
    SparseOptimizer,
    Table,
    checkpoint,
    memory_in_use,
    set_memory_limit,
    table_names,
    table_statistics,
)
from recstore_ops.state import optimizer_state, table_rows

__all__ = ["pair"]

pytestmark = [pytest.mark.tier("test"), pytest.mark.embedded_only("tables on servers cannot be copied")]


def all_rows(table: Table) -> Tensor:
    """The rows of a few ids more than are trained, where the table takes more."""
    ids = torch.arange(-2, NUM + 3) if table.config.num_embeddings is None else torch.arange(NUM)
    return torch.ops.recstore.emb_read.table(table.handle, ids, table.dim)


def same(state: Any, other: Any) -> bool:
    """Whether two nests of tensors are equal to the bit."""
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(same(state[key], other[key]) for key in state)
    if isinstance(state, tuple | list):
        return len(state) == len(other) and all(map(same, state, other))
    return state == other


def train(module: Any, ids: Tensor = IDS, optimizer: SparseOptimizer | None = None) -> None:
    (module(ids) + 1).square().sum().backward()
    (optimizer or SparseOptimizer(modules=[module])).step()


@each_kind
def test_a_copy_trains_alone(kind: Kind, pair: Pair) -> None:
    pair.backward()
    pair.step()
    copied: Any = copy.deepcopy(pair.model)
    [table] = copied[0].tables()
    assert table.name == f"{pair.table.name}.copy"
    assert copied[0].tables()[0].config.optimizer == pair.table.config.optimizer
    before = pair.rows()
    assert torch.equal(kind.outputs(copied[0]), kind.outputs(pair.module))
    kind.outputs(copied[0]).sum().backward()
    SparseOptimizer(modules=[copied]).step()
    assert torch.equal(pair.rows(), before)
    of_copy = all_rows(table)
    pair.rival.zero_grad()
    pair.backward()
    pair.step()
    pair.assert_equal_rows()
    assert torch.equal(all_rows(table), of_copy)


@each_kind
def test_a_copy_is_like_its_original_and_gradients_stay_there(kind: Kind, pair: Pair) -> None:
    pair.backward()
    copied = copy.deepcopy(pair.module)
    assert pair.table.has_collected()
    assert not copied.tables()[0].has_collected()
    assert type(copied) is type(pair.module)
    assert repr(copied).replace(".copy'", "'") == repr(pair.module)
    assert [each.requires_grad for each in copied.parameters()] == [True]


@each_kind
def test_a_frozen_module_has_a_frozen_copy(kind: Kind, pair: Pair) -> None:
    pair.module.requires_grad_(False)
    copied = copy.deepcopy(pair.module)
    assert not kind.outputs(copied).requires_grad
    copied.requires_grad_(True)
    assert kind.outputs(copied).requires_grad
    assert not kind.outputs(pair.module).requires_grad


@pytest.mark.parametrize("optimizer", KINDS)
def test_model_and_optimizer_copied_together_go_on_alike(optimizer: str, table_name: Callable[[], str]) -> None:
    # Normal initial values: ids that neither has seen must be equal too.
    model: Any = nn.Sequential(DistEmbedding(None, DIM, table_name(), optimizer={"kind": optimizer}))
    own = SparseOptimizer(modules=[model])
    for _ in range(3):
        train(model, optimizer=own)
    own.param_groups[0]["lr"] = 0.125
    copies: tuple[Any, SparseOptimizer] = copy.deepcopy((model, own))
    model_copy, own_copy = copies
    [table], [twin] = model[0].tables(), model_copy[0].tables()
    for step in range(4):
        assert torch.equal(all_rows(twin), all_rows(table)), step
        assert same(table_rows(twin), table_rows(table))
        assert same(optimizer_state(twin, 0.1), optimizer_state(table, 0.1)), step
        ids = torch.tensor([step, 1, NUM + step])
        train(model, ids, own)
        train(model_copy, ids, own_copy)
    assert table.statistics()["step"] == 7
    assert own_copy.param_groups[0]["table"] == twin.name
    assert own_copy.param_groups[0]["lr"] == 0.125


def test_an_optimizer_copied_alone_has_modules_of_its_own_as_in_torch(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    optimizer = SparseOptimizer(modules=[module])
    train(module, optimizer=optimizer)
    before = all_rows(module.table)
    copied = copy.deepcopy(optimizer)
    [own] = copied._modules or []
    assert isinstance(own, DistEmbedding)
    train(own, optimizer=copied)
    assert torch.equal(all_rows(module.table), before)
    assert not torch.equal(all_rows(own.table), before)
    assert list(copied.state_dict()["state"]) == [own.name]
    copied.zero_grad()


def test_an_optimizer_without_modules_can_be_copied(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    optimizer = SparseOptimizer(lr=0.5)
    module_copy, copied = copy.deepcopy((module, optimizer))
    module_copy(IDS).sum().backward()
    copied.step([module_copy])
    assert module_copy.weight[[2]].tolist() == [[-1.0] * DIM]
    assert module.weight[[2]].tolist() == [[0.0] * DIM]


def test_a_scheduler_copied_with_its_optimizer_schedules_the_copy(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    optimizer = SparseOptimizer(modules=[module])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(module, optimizer=optimizer)
    schedule.step()
    module_copy, optimizer_copy, schedule_copy = copy.deepcopy((module, optimizer, schedule))
    assert schedule_copy.optimizer is optimizer_copy
    train(module_copy, optimizer=optimizer_copy)
    schedule_copy.step()
    assert (optimizer_copy.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]) == (0.25, 0.5)


def test_a_rate_set_by_hand_is_copied(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    RecStoreClient().set_learning_rate(module.name, 0.25)
    assert copy.deepcopy(module).table.learning_rate() == (0.25, True)


def test_what_is_counted_for_admission_and_eviction_is_copied(table_name: Callable[[], str]) -> None:
    options: dict[str, Any] = {
        "admission": {"kind": "count", "threshold": 3},
        "eviction": {"ttl": 2, "interval": 1, "delay": 1},
        **OPTIONS,
    }
    module = DistEmbedding(None, DIM, table_name(), **options)
    for _ in range(2):
        train(module)
    assert table_statistics(module.name)["candidates"] == 2
    copied = copy.deepcopy(module)
    for step in range(9):
        ids = IDS if step < 2 else torch.tensor([4])
        train(module, ids)
        train(copied, ids)
        found, of_copy = table_statistics(module.name), table_statistics(copied.name)
        assert [found[key] for key in ("rows", "candidates", "evictions")] == [
            of_copy[key] for key in ("rows", "candidates", "evictions")
        ], step
    assert table_statistics(copied.name)["evictions"] > 0


def test_modules_that_share_a_table_share_its_copy(table_name: Callable[[], str]) -> None:
    name = table_name()
    model: Any = nn.ModuleList([DistEmbedding(NUM, DIM, name, **OPTIONS) for _ in range(2)])
    first, second = copy.deepcopy(model)
    assert first.table.table_id == second.table.table_id != model[0].table.table_id
    assert first.table is not second.table
    train(first)
    assert torch.equal(first.weight[IDS], second.weight[IDS])
    [same_module, again] = copy.deepcopy(nn.ModuleList([model[0], model[0]]))
    assert same_module is again


def test_names_of_copies_are_the_first_free_ones(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name())
    first, second = copy.deepcopy(module), copy.deepcopy(module)
    third = copy.deepcopy(second)
    assert [each.name for each in (first, second, third)] == [
        f"{module.name}.copy",
        f"{module.name}.copy2",
        f"{module.name}.copy3",
    ]
    del first
    gc.collect()
    assert copy.deepcopy(third).name == f"{module.name}.copy"


@each_kind
def test_a_copy_goes_with_its_last_owner(kind: Kind, table_name: Callable[[], str]) -> None:
    module = kind.open(table_name())
    copied = copy.deepcopy(module)
    name = copied.tables()[0].name
    others = [
        copied,
        copy.copy(copied),
        pickle.loads(pickle.dumps(copied)),
        DistTensor.over(copied.tables()[0], (NUM, DIM)),
    ]
    del copied
    while others:
        gc.collect()
        assert name in table_names()
        others.pop(0)
    gc.collect()
    assert name not in table_names()


def test_looking_a_copy_up_does_not_keep_it_and_opening_it_does(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name())
    looked_up, opened = copy.deepcopy(module), copy.deepcopy(module)
    names = [looked_up.name, opened.name]
    client = RecStoreClient()
    client.pull(names[0], IDS)
    DistEmbedding(NUM, DIM, names[1], seed=opened.table.config.seed)
    del looked_up, opened
    gc.collect()
    assert [name in table_names() for name in names] == [False, True]
    with pytest.raises(KeyError):
        client.pull(names[0], IDS)


def test_a_tensor_and_a_table_are_copied_as_modules_are(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    tensor = DistTensor((NUM, DIM), torch.float32, table_name(), lambda shape, _: torch.ones(shape), persistent=True)
    for original in (module.weight, tensor, module.table):
        copied = copy.deepcopy(original)
        assert copied.name == f"{original.name}.copy"
        assert type(copied) is type(original)
    copied = copy.deepcopy(tensor)
    copied[[1]] = torch.zeros(1, DIM)
    assert tensor[[1]].eq(1).all()
    assert copied.name in RecStoreClient().gdata_name_list()
    assert pickle.loads(pickle.dumps(copied))[[1]].eq(0).all()


def test_a_stand_in_is_copied_with_its_module(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    copied: tuple[DistEmbedding, list[Any]] = copy.deepcopy((module, list(module.parameters())))
    module_copy, [parameter] = copied
    parameter.requires_grad_(False)
    assert parameter._table is module_copy.table
    assert (module.frozen, module_copy.frozen) == (False, True)


def test_a_hash_table_and_its_copy_have_names_of_their_own(table_name: Callable[[], str]) -> None:
    module = HashTable(DIM, table_name())
    copied = copy.deepcopy(module)
    assert {module.name, copied.name} <= set(HashTableRegister().names())
    name = copied.name
    del copied
    gc.collect()
    assert name not in HashTableRegister().names()
    assert module.name in HashTableRegister().names()


def test_a_state_goes_from_a_model_to_its_copy(table_name: Callable[[], str]) -> None:
    model: Any = nn.Sequential(DistEmbedding(None, DIM, table_name(), **OPTIONS), nn.Linear(DIM, 1))
    target: Any = copy.deepcopy(model)
    train(model)
    assert not torch.equal(target[0].weight[IDS], model[0].weight[IDS])
    target.load_state_dict(model.state_dict())
    assert torch.equal(target[0].weight[IDS], model[0].weight[IDS])


def test_a_checkpoint_holds_a_copy_as_a_table_of_its_name(table_name: Callable[[], str], tmp_path: Any) -> None:
    module = DistEmbedding(None, DIM, table_name(), **OPTIONS)
    train(module)
    copied = copy.deepcopy(module)
    train(copied)
    saved = all_rows(copied.table)
    checkpoint.save(tmp_path)
    train(copied)
    checkpoint.load(tmp_path)
    assert torch.equal(all_rows(copied.table), saved)


def test_a_table_that_was_dropped_cannot_be_copied(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name())
    RecStoreClient().drop(module.name)
    with pytest.raises(RuntimeError, match="cannot be copied: it was dropped"):
        copy.deepcopy(module)
    assert f"{module.name}.copy" not in table_names()


def test_a_copy_that_finds_no_memory_leaves_nothing_behind(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, 64, table_name(), **OPTIONS)
    module.weight[torch.arange(20_000)] = torch.ones(20_000, 64)
    set_memory_limit(memory_in_use() + (1 << 20))
    try:
        with pytest.raises(RuntimeError, match="memory"):
            copy.deepcopy(nn.Sequential(DistEmbedding(None, 2, table_name()), module))
    finally:
        set_memory_limit(None)
    gc.collect()
    assert [name for name in table_names() if name.endswith(".copy") and module.name in name] == []
