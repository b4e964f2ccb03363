"""`state_dict` of modules and of `SparseOptimizer`: what it holds, round trips, refusals, and torch's formats."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_kinds import KINDS, TABLES, table_id
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.multiprocessing.spawn import spawn
from torch.optim import lr_scheduler

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    checkpoint,
    get_kv_client,
    table_names,
    table_statistics,
)
from recstore_ops.state import tables_left_out
from recstore_ops.state.ids_check import check_of_ids

pytestmark = [pytest.mark.tier("test"), pytest.mark.usefixtures("tables_are_dropped")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Alike = Callable[[Tensor, Tensor], bool]
ADAM = {"kind": "adam", "lr": 0.1}
DIM = 2


class Everything(nn.Module):
    """A module of each kind, and a dense layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"optimizer": "adam", **options}
        self.embedding = DistEmbedding(None, DIM, "state/embedding", **options)
        self.bag = DistEmbeddingBag(100, DIM, "state/bag.of.ids", padding_idx=0, **options)
        self.hashtable = HashTable([1, DIM], "state/hashtable", **options)
        features = ["seen", "bought"]
        tables = [
            {"name": f"state/bags/{name}", "num_embeddings": None, "embedding_dim": DIM, "feature_names": [name]}
            for name in features
        ]
        self.bags = RecStoreEmbeddingBagCollection(tables, **options)
        self.rows = RecStoreEmbeddingCollection(
            [{**tables[0], "name": "state/rows/item"}, {**tables[1], "name": "state/rows/user"}], **options
        )
        self.dense = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        counts = torch.full((2,), ids.numel() // 2)
        batch = KeyedJaggedTensor(["seen", "bought"], ids, lengths=counts)
        pooled = self.bags(batch).sum(dim=(0, 1))
        rows = sum((part.values().sum(dim=0) for part in self.rows(batch).values()), torch.zeros(DIM))
        single = self.embedding(ids).sum(dim=0) + self.hashtable(ids).sum(dim=(0, 1))
        return self.dense(pooled + rows + single + self.bag(ids.abs().unsqueeze(0)).sum(dim=0)).sum()


class Training:
    """A model and its optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sparse = SparseOptimizer(modules=[model])
        # Without state: DCP would not load what a new optimizer does not have yet.
        self.dense = torch.optim.SGD(model.parameters(), lr=0.001)

    def steps(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            ids = torch.randint(-20, 20, (8,), generator=generator)
            self.dense.zero_grad()
            self.model(ids).square().backward()
            self.dense.step()
            self.sparse.step()

    def state(self) -> dict[str, Any]:
        states = {"model": self.model, "optim": self.sparse, "dense": self.dense}
        return copy.deepcopy({name: part.state_dict() for name, part in states.items()})

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.sparse.load_state_dict(state["optim"])
        self.dense.load_state_dict(state["dense"])


def drop_all() -> None:
    for name in table_names():
        if name.startswith("state/"):
            get_kv_client().drop(name)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain(state: Any) -> dict[str, Any]:
    """A state whose tensors are of no other type, as a file holds it."""
    return {key: value.as_subclass(Tensor) for key, value in state.items()}


def assert_equal(ours: Any, theirs: Any, path: str = "state", are_alike: Alike = torch.equal) -> None:
    """Compares states, unless told otherwise to the bit; a file has no types of tensors."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype, path
        assert are_alike(ours, theirs), path
        return
    assert type(ours) is type(theirs), path
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{path}.{key}", are_alike)
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(our, their, f"{path}.{place}", are_alike)
    else:
        assert ours == theirs, path


# What a state holds


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_holds_ids_rising_and_rows_in_the_row_type(dtype: torch.dtype, table_name: Callable[[], str]) -> None:
    ids, rows = torch.tensor([7, -(2**63), 2**62]), torch.randn(3, DIM)
    modules = [cls(None, DIM, table_name(), dtype=dtype) for cls in (DistEmbedding, DistEmbeddingBag)]
    for module in [*modules, HashTable(DIM, table_name(), dtype=dtype)]:
        module.weight[ids] = rows
        expected = {"ids": ids[[1, 0, 2]], "rows": rows[[1, 0, 2]].to(dtype), "ids_check": check_of_ids(ids)}
        assert_equal(plain(module.state_dict()), expected)
        assert torch.equal(module.rows(), rows[[1, 0, 2]].to(dtype))
        assert sorted(module.ids().tolist()) == sorted(ids.tolist())


def test_the_state_of_a_collection_holds_each_table(table_name: Callable[[], str]) -> None:
    names = [table_name(), table_name()]
    tables = [{"name": name, "num_embeddings": None, "embedding_dim": DIM, "feature_names": [name]} for name in names]
    bags = RecStoreEmbeddingBagCollection(tables)
    for place, name in enumerate(names):
        bags.embedding_bags[name].weight[[place]] = torch.full((DIM,), float(place))

    state = plain(bags.state_dict())

    assert bytes(state["_extra_state"].tolist()).decode() == json.dumps(names)
    for place in range(2):
        assert_equal(state[f"_modules_of_tables.{place}.ids"], torch.tensor([place]))
        assert_equal(state[f"_modules_of_tables.{place}.rows"], torch.full((1, DIM), float(place)))


def test_a_table_without_rows_has_a_state(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name(), dtype=torch.bfloat16)
    expected = {"ids": torch.empty(0, dtype=torch.int64), "rows": torch.empty(0, DIM, dtype=torch.bfloat16)}
    assert_equal(plain(module.state_dict()), {**expected, "ids_check": check_of_ids(expected["ids"])})
    module.weight[[3]] = torch.ones(DIM)
    module.load_state_dict(expected)
    assert len(module.table) == 0


def test_the_state_of_an_optimizer_holds_slots_steps_rates_and_groups(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name(), optimizer=ADAM)
    optimizer = SparseOptimizer(modules=[module])
    module(torch.tensor([5, -5])).sum().backward()
    optimizer.step()

    state = optimizer.state_dict()

    ids, slots, progress = state["state"][module.name]
    assert ids.tolist() == [-5, 5]
    assert sorted(slots) == ["exp_avg", "exp_avg_sq"]
    assert torch.allclose(slots["exp_avg"], torch.full((2, DIM), 0.1))
    rule = {"kind": "adam", "betas": [0.9, 0.999], "eps": 1e-8, "bias_correction": "table"}
    rates = {"learning_rate": 0.1, "learning_rate_was_set": False, "group_lr": 0.1}
    assert progress == {"step": 1, **rates, "optimizer": rule}
    assert state["param_groups"] == [{"lr": 0.1, "table": module.name, "params": [0]}]


# Round trips


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=table_id(options)) for options in TABLES),
        *(
            pytest.param({"optimizer": kind, "dtype": dtype}, id=f"{kind}-{dtype}")
            for kind in KINDS
            for dtype in DTYPES[1:]
        ),
    ],
)
def test_training_goes_on_to_the_bit_after_a_round_trip(options: dict[str, Any]) -> None:
    # A state has rows as they are read: those that catch up are rounded once more on their way.
    catches_up = "catch_up" in options["optimizer"]
    are_alike = partial(torch.allclose, rtol=1e-5, atol=1e-7) if catches_up else torch.equal
    torch.manual_seed(0)
    training = Training(Everything(**options))
    training.steps(3, seed=1)
    saved = through_a_file(training.state())
    training.steps(3, seed=2)
    expected = training.state()

    del training
    drop_all()
    resumed = Training(Everything(**options))
    resumed.steps(1, seed=9)  # Rows, steps and slots that the load has to replace.
    resumed.load(saved)
    assert_equal(resumed.state(), saved)
    resumed.steps(3, seed=2)

    assert_equal(resumed.state(), expected, are_alike=are_alike)


def test_a_load_replaces_all_rows(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name(), optimizer=ADAM)
    module.weight[[1, 2]] = torch.ones(2, DIM)
    state = copy.deepcopy(module.state_dict())
    module.weight[[2, 3]] = torch.zeros(2, DIM)

    assert module.load_state_dict(state).missing_keys == []

    assert_equal(module.state_dict(), state)
    assert table_statistics(module.name)["deletes"] == 1


def test_a_load_of_a_model_alone_keeps_the_slots_of_rows_that_stay(table_name: Callable[[], str]) -> None:
    table = HashTable(DIM, table_name(), optimizer="adagrad")
    ids = torch.tensor([1, 2])
    table.accept_grad(ids, torch.ones(2, DIM))
    SparseOptimizer(modules=[table]).step()
    slot = table.slot_names()[1]
    before = table.slot(slot, ids)

    table.load_state_dict({"_extra_state": (torch.tensor([2, 3]), torch.zeros(2, DIM))})

    assert torch.equal(table.slot(slot, ids), torch.stack([torch.zeros(DIM), before[1]]))


def test_tables_can_be_left_out(table_name: Callable[[], str]) -> None:
    table = DistEmbedding(None, DIM, table_name())
    table.weight[[1]] = torch.ones(DIM)
    model = nn.Sequential(table, new_collection([table_name()]), nn.Linear(DIM, 1))
    before = copy.deepcopy(model.state_dict())
    with tables_left_out():
        state = through_a_file(model.state_dict())
        assert list(state) == ["1._extra_state", "2.weight", "2.bias"]
        state["2.bias"].fill_(3.0)
        model.load_state_dict(state)
        model.load_state_dict({**state, "0._extra_state": (), "1._modules_of_tables.0._extra_state": ()})
    assert_equal(dict(model.state_dict()), {**before, "2.bias": torch.tensor([3.0])})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.ids", "0.rows"'):
        model.load_state_dict(state)
    with pytest.raises(TypeError, match=r"of two tensors, got a tuple of 0"):
        model.load_state_dict({**state, "0._extra_state": (), "1._modules_of_tables.0._extra_state": ()})


def test_an_optimizer_without_modules_keeps_the_tables_it_stepped(table_name: Callable[[], str]) -> None:
    module, other = (DistEmbedding(None, DIM, table_name(), optimizer=ADAM) for _ in range(2))
    optimizer = SparseOptimizer()
    module(torch.tensor([1])).sum().backward()
    optimizer.step([module])
    state = through_a_file(optimizer.state_dict())
    assert list(state["state"]) == [module.name]

    module(torch.tensor([1])).sum().backward()
    optimizer.step([module])
    resumed = SparseOptimizer()
    resumed.load_state_dict(state)

    assert_equal(resumed.state_dict(), state)
    assert (table_statistics(module.name)["step"], table_statistics(other.name)["step"]) == (1, 0)


def test_tables_are_found_by_name_in_any_order(table_name: Callable[[], str]) -> None:
    modules = [DistEmbedding(None, DIM, table_name(), lr=lr) for lr in (0.5, 0.25)]
    state = SparseOptimizer(modules=modules).state_dict()
    resumed = SparseOptimizer(modules=modules[::-1])
    resumed.load_state_dict(state)
    assert [group["lr"] for group in resumed.param_groups] == [0.25, 0.5]


def test_a_schedule_goes_on_and_a_rate_set_by_hand_stays(table_name: Callable[[], str]) -> None:
    scheduled, fixed = (DistEmbedding(None, DIM, table_name(), lr=1.0) for _ in range(2))
    optimizer = SparseOptimizer(modules=[scheduled, fixed])
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    get_kv_client().set_learning_rate(fixed.name, 0.125)
    optimizer.step()
    scheduler.step()  # The group of the first table now has a rate that the table does not know yet.
    states = through_a_file([optimizer.state_dict(), scheduler.state_dict()])

    optimizer = SparseOptimizer(modules=[scheduled, fixed])
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    assert_equal(optimizer.state_dict(), states[0])
    optimizer.step()

    rates = [table_statistics(module.name)["learning_rate"] for module in (scheduled, fixed)]
    assert rates == [0.5, 0.0625]
    assert [table_statistics(module.name)["learning_rate_was_set"] for module in (scheduled, fixed)] == [False, True]


def test_a_save_after_a_load_of_an_optimizer_is_a_delta(table_name: Callable[[], str], tmp_path: Path) -> None:
    module = DistEmbedding(None, DIM, table_name(), optimizer=ADAM)
    optimizer = SparseOptimizer(modules=[module])
    module(IDS).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    checkpoint.save(tmp_path)
    optimizer.load_state_dict(state)
    report = checkpoint.save(tmp_path, kind="delta")
    assert (report.is_delta, report.rows) == (True, IDS.numel())
    checkpoint.load(tmp_path)
    assert_equal(optimizer.state_dict(), state)


# What is refused


def rows_of(count: int = 2, dim: int = DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dim, dtype=dtype)


IDS = torch.tensor([1, 2])
NOT_FINITE = torch.tensor([[0.0, 0.0], [0.0, torch.inf]])


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (rows_of(), TypeError, r"takes a state \(ids, rows\) of two tensors, got a tensor of torch.float32"),
        ((IDS, rows_of(), 1), TypeError, r"of two tensors, got a tuple of 3"),
        ((IDS, None), TypeError, r"of two tensors, got a tuple of 2"),
        (None, TypeError, r"of two tensors, got a NoneType"),
        ((IDS.int(), rows_of()), TypeError, r"ids of torch.int64, got torch.int32"),
        ((IDS.view(1, 2), rows_of()), ValueError, r"1-D ids, got 2-D"),
        (
            (IDS, rows_of(dtype=torch.bfloat16)),
            TypeError,
            r"has rows of float32 and takes a state of torch.float32, got one of torch.bfloat16",
        ),
        ((IDS, rows_of(dim=3)), ValueError, r"takes rows of shape \(2, 2\), got \(2, 3\)"),
        ((IDS, rows_of(count=3)), ValueError, r"takes rows of shape \(2, 2\), got \(3, 2\)"),
        ((torch.tensor([7, 7]), rows_of()), ValueError, r"has the id 7 more than once"),
        ((torch.tensor([7, 10]), rows_of()), IndexError, r"has the id 10, outside \[0, 10\), its num_embeddings"),
        ((torch.tensor([7, -1]), rows_of()), IndexError, r"has the id -1, outside \[0, 10\), its num_embeddings"),
        ((IDS, NOT_FINITE), ValueError, r"a row that is not finite, of the id 2 at position 1"),
    ],
)
def test_an_invalid_state_is_refused_and_changes_nothing(
    state: Any, error: type[Exception], message: str, table_name: Callable[[], str]
) -> None:
    module = DistEmbedding(10, DIM, table_name())
    module.weight[[4]] = torch.ones(DIM)
    before = module.state_dict(), table_statistics(module.name)
    with pytest.raises(error, match=message) as raised:
        module.load_state_dict({"_extra_state": state})
    assert module.name in str(raised.value)
    assert_equal((module.state_dict(), table_statistics(module.name)), before)


@pytest.mark.parametrize(("policy", "ids"), [("skip", [1]), ("allow", [1, 2])])
def test_rows_that_are_not_finite_follow_the_policy(policy: str, ids: list[int], table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name(), nan_policy=policy)
    module.weight[[2]] = torch.ones(DIM)
    module.load_state_dict({"_extra_state": (IDS, NOT_FINITE)})
    assert module.state_dict()["ids"].tolist() == ids
    assert torch.equal(module.rows(), NOT_FINITE[: len(ids)])
    assert table_statistics(module.name)["refusals"] == (policy == "skip")


def test_a_state_without_the_table_is_refused_where_strict(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "ids", "rows"'):
        module.load_state_dict({})
    assert module.load_state_dict({}, strict=False).missing_keys == ["ids", "rows"]


def new_collection(names: list[str]) -> RecStoreEmbeddingBagCollection:
    return RecStoreEmbeddingBagCollection(
        [{"name": name, "num_embeddings": None, "embedding_dim": DIM, "feature_names": [name]} for name in names]
    )


def test_the_tables_of_a_collection_in_another_order_are_refused(table_name: Callable[[], str]) -> None:
    names = [table_name(), table_name()]
    state = new_collection(names).state_dict()
    with pytest.raises(ValueError, match=r"the state is of the tables .*, but this collection has them as"):
        new_collection(names[::-1]).load_state_dict(state)
    new_collection([table_name(), table_name()]).load_state_dict(state)  # Other tables may have other names.


def test_a_collection_changes_no_table_where_one_is_refused(table_name: Callable[[], str]) -> None:
    bags = nn.Sequential(new_collection([table_name(), table_name()]))
    before = bags.state_dict()
    state = {
        **before,
        "0._modules_of_tables.0.ids": IDS,
        "0._modules_of_tables.0.rows": rows_of(),
        "0._modules_of_tables.1.ids": IDS,
        "0._modules_of_tables.1.rows": rows_of(dim=3),
    }
    with pytest.raises(ValueError, match=r"takes rows of shape \(2, 2\), got \(2, 3\)"):
        bags.load_state_dict(state)
    assert_equal(dict(bags.state_dict()), dict(before))


# torch.distributed.checkpoint


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads_tables_that_grew_or_shrank(tmp_path: Path) -> None:
    training = Training(Everything())
    training.steps(3, seed=1)
    saved = training.state()
    state_dict_saver.save(saved, checkpoint_id=tmp_path / "checkpoint")
    training.steps(3, seed=2)
    expected = training.state()

    del training
    drop_all()
    resumed = Training(Everything())
    state = resumed.state()  # Of empty tables.
    state_dict_loader.load(state, checkpoint_id=tmp_path / "checkpoint")
    resumed.load(state)
    assert_equal(resumed.state(), saved)
    resumed.steps(3, seed=2)
    assert_equal(resumed.state(), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_takes_the_objects_themselves_and_converts_to_torch_save(tmp_path: Path) -> None:
    training = Training(Everything())
    training.steps(3, seed=1)
    saved = training.state()
    objects: dict[str, Any] = {"model": training.model, "optim": training.sparse}
    state_dict_saver.save(objects, checkpoint_id=tmp_path / "checkpoint")
    training.steps(3, seed=2)
    state_dict_loader.load(objects, checkpoint_id=tmp_path / "checkpoint")
    assert_equal(training.state()["optim"], saved["optim"])

    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "state.pt")
    converted = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_equal(dict(converted["model"]), dict(saved["model"]))
    assert_equal(converted["optim"]["state"], saved["optim"]["state"])


@pytest.mark.parametrize("options", [None, StateDictOptions(full_state_dict=True, cpu_offload=True)])
def test_the_state_that_torch_distributed_asks_for_holds_the_tables(options: StateDictOptions | None) -> None:
    training = Training(Everything())
    training.steps(2, seed=1)
    saved = training.model.state_dict()
    state = get_model_state_dict(training.model, options=options)
    assert_equal(dict(state), dict(saved))
    training.steps(2, seed=2)
    set_model_state_dict(training.model, state)
    assert_equal(dict(training.model.state_dict()), dict(saved))


def rank_training(rank: int, group: Any = None) -> Training:
    torch.manual_seed(rank)
    table = DistEmbedding(None, DIM, f"state/rank{rank}", optimizer=ADAM, process_group=group)
    return Training(nn.Sequential(table, nn.Flatten(0), nn.Linear(8 * DIM, 1)))


def of_rank(rank: int, state: dict[str, Any]) -> dict[str, Any]:
    """A state under keys of its own: DCP takes equal keys of several ranks for copies, and keeps one."""
    return {f"rank{rank}": state}


def run_rank(rank: int, directory: str, is_resumed: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{directory}/store{is_resumed}", rank=rank, world_size=2)
    alone = [torch.distributed.new_group([each]) for each in (0, 1)]
    training = rank_training(rank, alone[rank])
    if is_resumed:
        state = of_rank(rank, training.state())
        state_dict_loader.load(state, checkpoint_id=f"{directory}/checkpoint")
        training.load(state[f"rank{rank}"])
        training.steps(3 + rank, seed=2)
        torch.save(training.state(), f"{directory}/{rank}.pt")
    else:
        training.steps(3 + rank, seed=1)
        state_dict_saver.save(of_rank(rank, training.state()), checkpoint_id=f"{directory}/checkpoint")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.tier("all")
def test_dcp_saves_and_loads_the_tables_of_two_processes(tmp_path: Path) -> None:
    for is_resumed in (False, True):
        spawn(run_rank, (str(tmp_path), is_resumed), nprocs=2)

    for rank in (0, 1):
        training = rank_training(rank)
        training.steps(3 + rank, seed=1)
        saved = training.state()
        training.steps(3 + rank, seed=2)
        assert_equal(torch.load(tmp_path / f"{rank}.pt", weights_only=True), training.state())
        state = of_rank(rank, training.state())
        state_dict_loader.load(state, checkpoint_id=tmp_path / "checkpoint")  # One process reads what two wrote.
        training.load(state[f"rank{rank}"])
        assert_equal(training.state(), saved)
