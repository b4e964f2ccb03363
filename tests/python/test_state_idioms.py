"""What programs do with state dicts, done with those of every kind of module over tables."""

from __future__ import annotations

import copy
import io
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from module_kinds import DIM, KINDS, NUM, OPTIONS, Kind, each_kind
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

from recstore_ops import DistEmbedding, DistEmbeddingBag, HashTable, SparseOptimizer, table_statistics

pytestmark = pytest.mark.tier("test")

State = dict[str, Any]


class Model(nn.Module):
    """A module over a table, and a dense layer."""

    def __init__(self, kind: Kind, name: str) -> None:
        super().__init__()
        self.sparse = kind.open(name)
        self.top = nn.Linear(DIM, 1)


def rows_of(model: Any) -> Tensor:
    table = model.sparse.tables()[0]
    return torch.ops.recstore.emb_read.table(table.handle, torch.arange(NUM), DIM)


def trained(kind: Kind, name: str) -> Model:
    model = Model(kind, name)
    table = model.sparse.tables()[0]
    torch.ops.recstore.emb_write.table(table.handle, torch.arange(NUM), torch.randn(NUM, DIM))
    return model


# What a program does with a state before it loads it.


def to_file(state: State, path: Path) -> State:
    torch.save(state, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True)


def mapped_file(state: State, path: Path) -> State:
    torch.save(state, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True, mmap=True, map_location="cpu")


def to_buffer(state: State, path: Path) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def to_safetensors(state: State, path: Path) -> State:
    save_file({key: value.contiguous() for key, value in state.items()}, path / "state.safetensors")
    return load_file(path / "state.safetensors")


def prefixed(state: State, path: Path) -> State:
    wrapped = {f"module.{key}": value for key, value in state.items()}
    consume_prefix_in_state_dict_if_present(wrapped, "module.")
    return wrapped


def renamed(state: State, path: Path) -> State:
    old = {key.replace("sparse.", "backbone."): value for key, value in state.items()}
    return {key.replace("backbone.", "sparse."): value for key, value in old.items()}


def filtered(state: State, path: Path) -> State:
    parts = [{key: value for key, value in state.items() if key.startswith(prefix)} for prefix in ("sparse.", "top.")]
    return {**parts[0], **parts[1]}


def in_place(state: State, path: Path) -> State:
    for key in list(state):
        state[key] = state.pop(key).to("cpu", copy=True)
    return state


def through_numpy(state: State, path: Path) -> State:
    return {key: torch.from_numpy(value.numpy().copy()) for key, value in state.items()}


IDIOMS: dict[str, Callable[[State, Path], State]] = {
    "as it is": lambda state, path: state,
    "cpu": lambda state, path: {key: value.cpu() for key, value in state.items()},
    "clone": lambda state, path: {key: value.detach().clone() for key, value in state.items()},
    "contiguous": lambda state, path: OrderedDict((key, value.contiguous()) for key, value in state.items()),
    "view": lambda state, path: {key: value.view(value.shape) for key, value in state.items()},
    "data": lambda state, path: {key: value.data for key, value in state.items()},
    "deepcopy": lambda state, path: copy.deepcopy(state),
    "in place": in_place,
    "numpy": through_numpy,
    "torch.save": to_file,
    "torch.load(mmap=True)": mapped_file,
    "torch.load(weights_only=False)": to_buffer,
    "safetensors": to_safetensors,
    "a prefix": prefixed,
    "other names": renamed,
    "parts": filtered,
}


@pytest.mark.parametrize("idiom", IDIOMS.values(), ids=IDIOMS.keys())
@each_kind
def test_a_state_is_taken_as_one_of_parameters(
    kind: Kind, idiom: Callable[[State, Path], State], table_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = trained(kind, table_name()), Model(kind, table_name())
    before = rows_of(target)
    state = idiom(source.state_dict(), tmp_path)
    target.load_state_dict(state)
    assert not torch.equal(rows_of(target), before)
    assert torch.equal(rows_of(target), rows_of(source))
    assert torch.equal(target.top.weight, source.top.weight)


@each_kind
def test_every_value_of_a_state_is_a_tensor(kind: Kind, table_name: Callable[[], str]) -> None:
    state = trained(kind, table_name()).state_dict()
    rows = [value for key, value in state.items() if key.endswith(".rows")]
    assert all(isinstance(value, Tensor) for value in state.values())
    assert [value.shape for value in rows] == [(NUM, DIM)]
    assert sum(value.numel() for value in rows) == NUM * DIM
    for value in state.values():
        assert value.nbytes == value.numel() * value.element_size()
        assert (value.device.type, value.requires_grad) == ("cpu", False)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@each_kind
def test_a_state_of_another_model_is_loaded(
    kind: Kind, strict: bool, assign: bool, table_name: Callable[[], str]
) -> None:
    source, target = trained(kind, table_name()), Model(kind, table_name())
    found = target.load_state_dict(source.state_dict(), strict=strict, assign=assign)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert torch.equal(rows_of(target), rows_of(source))


@each_kind
def test_keys_of_other_names_are_told(kind: Kind, table_name: Callable[[], str]) -> None:
    source, target = trained(kind, table_name()), Model(kind, table_name())
    state = {f"module.{key}": value for key, value in source.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*sparse\..*ids.*Unexpected key.*module\.sparse\..*ids"):
        target.load_state_dict(state)
    found = target.load_state_dict(state, strict=False)
    assert sorted(found.unexpected_keys) == sorted(state)
    assert sorted(found.missing_keys) == sorted(key for key in source.state_dict() if not key.endswith("ids_check"))
    assert rows_of(target).eq(0).all()


@each_kind
def test_models_go_through_safetensors(kind: Kind, table_name: Callable[[], str], tmp_path: Path) -> None:
    source, target = trained(kind, table_name()), Model(kind, table_name())
    save_model(source, str(tmp_path / "model.safetensors"))
    assert load_model(target, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(rows_of(target), rows_of(source))


@each_kind
def test_the_state_that_torch_distributed_asks_for_is_loaded(kind: Kind, table_name: Callable[[], str]) -> None:
    source, target = trained(kind, table_name()), Model(kind, table_name())
    set_model_state_dict(target, get_model_state_dict(source))
    assert torch.equal(rows_of(target), rows_of(source))


@pytest.mark.parametrize("full", [False, True])
@each_kind
def test_a_frozen_table_is_left_out_if_frozen_parameters_are(
    kind: Kind, full: bool, table_name: Callable[[], str]
) -> None:
    source, target = trained(kind, table_name()), trained(kind, table_name())
    options = StateDictOptions(ignore_frozen_params=True, full_state_dict=full, cpu_offload=full, strict=False)
    source.sparse.requires_grad_(False)
    source.top.bias.requires_grad_(False)
    state, rows = get_model_state_dict(source, options=options), rows_of(target)
    assert {key for key in state if not key.endswith("_extra_state")} == {"top.weight"}
    set_model_state_dict(target, state, options=options)
    assert torch.equal(rows_of(target), rows)
    assert torch.equal(target.top.weight, source.top.weight)
    source.sparse.requires_grad_(True)
    set_model_state_dict(target, get_model_state_dict(source, options=options), options=options)
    assert torch.equal(rows_of(target), rows_of(source))


def test_one_frozen_table_of_several_is_left_out(table_name: Callable[[], str]) -> None:
    model: Any = nn.Sequential(*[DistEmbedding(NUM, DIM, table_name(), **OPTIONS) for _ in range(2)])
    options = StateDictOptions(ignore_frozen_params=True)
    model[0].requires_grad_(False)
    assert set(get_model_state_dict(model, options=options)) == {"1.ids", "1.rows", "1.ids_check"}
    assert set(get_model_state_dict(model[0], options=options)) == set()
    assert len(model.state_dict()) == 6


FUNCTIONS: dict[str, Callable[[nn.Module, Any, Any], Any]] = {
    "get_optimizer_state_dict": lambda model, sparse, dense: get_optimizer_state_dict(model, sparse),
    "get_optimizer_state_dict, flattened": lambda model, sparse, dense: get_optimizer_state_dict(
        model, sparse, options=StateDictOptions(flatten_optimizer_state_dict=True)
    ),
    "get_state_dict": lambda model, sparse, dense: get_state_dict(model, [dense, sparse]),
    "set_optimizer_state_dict": lambda model, sparse, dense: set_optimizer_state_dict(
        model, sparse, sparse.state_dict()
    ),
    "set_state_dict": lambda model, sparse, dense: set_state_dict(
        model,
        [dense, sparse],
        model_state_dict=model.state_dict(),
        optim_state_dict=get_optimizer_state_dict(model, dense),
    ),
}


@pytest.mark.parametrize("is_collected", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_that_look_for_parameters_name_the_way(
    function: str, is_collected: bool, table_name: Callable[[], str]
) -> None:
    name = table_name()
    model: Any = nn.Sequential(DistEmbedding(NUM, DIM, name, optimizer="adam"), nn.Linear(DIM, 1))
    sparse, dense = SparseOptimizer(modules=[model]), torch.optim.Adam(model[1].parameters())
    for _ in range(1 + is_collected):
        sparse.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        if not is_collected:
            sparse.step()
    before, rows, collected = table_statistics(name), model[0].rows(), len(model[0].table.collected())
    way = re.escape(f'SparseOptimizer has the tables "{name}" by name: save its state_dict() under a key of its own')
    with pytest.raises(RuntimeError, match=way):
        FUNCTIONS[function](model, sparse, dense)
    assert table_statistics(name) == before
    assert torch.equal(model[0].rows(), rows)
    assert len(model[0].table.collected()) == collected == is_collected


def test_the_dense_optimizer_beside_tables_goes_through_them(table_name: Callable[[], str]) -> None:
    model: Any = nn.Sequential(DistEmbedding(NUM, DIM, table_name(), **OPTIONS), nn.Linear(DIM, 1))
    sparse, dense = SparseOptimizer(modules=[model]), torch.optim.Adam(model[1].parameters())
    model(torch.tensor([1, 2])).sum().backward()
    dense.step()
    sparse.step()
    state = get_optimizer_state_dict(model, dense)
    other = torch.optim.Adam(model[1].parameters())
    set_optimizer_state_dict(model, other, state)
    assert torch.equal(other.state[model[1].weight]["exp_avg"], dense.state[model[1].weight]["exp_avg"])


@each_kind
def test_the_state_of_a_model_in_ddp_is_loaded_into_one_without(
    kind: Kind, table_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = trained(kind, table_name()), Model(kind, table_name())
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        state = DistributedDataParallel(source).state_dict()
    finally:
        dist.destroy_process_group()
    assert all(key.startswith("module.") for key in state)
    consume_prefix_in_state_dict_if_present(state, "module.")
    target.load_state_dict(state)
    assert torch.equal(rows_of(target), rows_of(source))


@each_kind
def test_a_state_in_half_precision_is_refused(kind: Kind, table_name: Callable[[], str]) -> None:
    model = trained(kind, table_name())
    state = {key: value.half() for key, value in model.state_dict().items()}
    with pytest.raises(
        TypeError, match=r"a state of torch.float32, got one of torch.float16|a tensor of torch.uint8, got"
    ):
        model.load_state_dict(state)


# The states of torch's own modules


def place_of(kind: Kind, model: Model) -> str:
    return next(key for key in model.state_dict() if key.endswith("ids")).removesuffix("ids")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each_kind
def test_the_weight_of_torch_s_module_is_loaded(kind: Kind, dtype: torch.dtype, table_name: Callable[[], str]) -> None:
    model, rival = trained(kind, table_name()), kind.rival().to(dtype)
    nn.init.normal_(rival.weight)
    state = {key: value for key, value in model.state_dict().items() if not key.endswith(("ids", "rows"))}
    state[f"{place_of(kind, model)}weight"] = rival.state_dict()["weight"]
    found = model.load_state_dict(state)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert torch.equal(rows_of(model), rival.weight.float())


def test_the_whole_state_of_torch_s_module_is_loaded(table_name: Callable[[], str]) -> None:
    for ours, theirs in [
        (DistEmbedding(None, DIM, table_name(), **OPTIONS), nn.Embedding(7, DIM, padding_idx=2)),
        (DistEmbeddingBag(7, DIM, table_name(), padding_idx=2, **OPTIONS), nn.EmbeddingBag(7, DIM, padding_idx=2)),
        (HashTable([1, DIM], table_name(), **OPTIONS), nn.Embedding(7, DIM)),
        (DistEmbedding(7, DIM, table_name(), dtype=torch.bfloat16, **OPTIONS), nn.Embedding(7, DIM)),
    ]:
        ours.weight[[3]] = torch.full((DIM,), 9.0)
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours.state_dict()["ids"], torch.arange(7))
        assert torch.equal(ours.state_dict()["rows"].float(), theirs.weight.detach().to(ours.rows().dtype).float())


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (
            {"weight": torch.zeros(NUM + 1, DIM)},
            ValueError,
            r'takes 5 rows of dim 2 as "weight", got .* shape \(6, 2\)',
        ),
        (
            {"weight": torch.zeros(NUM, DIM + 1)},
            ValueError,
            r'takes 5 rows of dim 2 as "weight", got .* shape \(5, 3\)',
        ),
        ({"weight": torch.zeros(NUM)}, ValueError, r'takes 5 rows of dim 2 as "weight", got a tensor of shape \(5,\)'),
        (
            {"weight": torch.zeros(NUM, DIM, dtype=torch.int8)},
            TypeError,
            r'takes a tensor of .* as "weight", got torch.int8',
        ),
        ({"weight": [1.0]}, TypeError, r'takes a tensor of torch.float64, .* as "weight", got list'),
        (
            {"weight": torch.ones(NUM, DIM).to(torch.float8_e4m3fn)},
            TypeError,
            r'takes a tensor of .* as "weight", got torch.float8_e4m3fn',
        ),
        ({"weight": torch.full((NUM, DIM), torch.nan)}, ValueError, r"a row that is not finite, of the id 0"),
        ({"ids": torch.tensor([1])}, ValueError, r'takes "ids" with "rows", or "weight" alone; the state has "ids"'),
        ({"rows": torch.zeros(1, DIM)}, ValueError, r'or "weight" alone; the state has "rows"'),
        (
            {"ids": torch.tensor([1]), "rows": torch.zeros(1, DIM), "weight": torch.zeros(NUM, DIM)},
            ValueError,
            r'the state has "ids" and "rows" and "weight"',
        ),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    state: State, error: type[Exception], message: str, strict: bool, table_name: Callable[[], str]
) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    module.weight[[4]] = torch.ones(DIM)
    before = module.rows()
    with pytest.raises(error, match=message) as raised:
        module.load_state_dict(state, strict=strict)
    assert module.name in str(raised.value)
    assert torch.equal(module.rows(), before)


@pytest.mark.parametrize("names", [None, torch.zeros(3), 7])
def test_what_are_no_names_of_tables_is_refused(names: Any, table_name: Callable[[], str]) -> None:
    bags = KINDS["RecStoreEmbeddingBagCollection"].open(table_name())
    with pytest.raises(TypeError, match=r"the names of tables in a state are a tensor of torch\.uint8, got"):
        bags.load_state_dict({**bags.state_dict(), "_extra_state": names})


def test_a_derived_module_has_an_extra_state_of_its_own(table_name: Callable[[], str]) -> None:
    class Counting(DistEmbedding):
        count = 0

        def get_extra_state(self) -> Tensor:
            return torch.tensor(self.count)

        def set_extra_state(self, state: Tensor) -> None:
            self.count = int(state)

    source, target = (Counting(NUM, DIM, table_name(), **OPTIONS) for _ in range(2))
    source.count = 3
    source.weight[[1]] = torch.ones(DIM)
    target.load_state_dict(source.state_dict())
    assert target.count == 3
    assert torch.equal(target.rows(), source.rows())


# States saved before rows had keys of their own


OLD = Path(__file__).parent / "fixtures" / "state_of_pairs.pt"


def test_states_of_pairs_are_read(table_name: Callable[[], str]) -> None:
    """The file holds a model's state as pairs `(ids, rows)`, and a collection's names as a tuple."""
    state = torch.load(OLD, weights_only=True)
    for kind in KINDS.values():
        model = Model(kind, table_name())
        own = "many" if any("_modules_of_tables" in key for key in model.state_dict()) else "one"
        model.load_state_dict(state[own])
        assert torch.equal(rows_of(model), torch.tensor([[0.0, 0], [1, -1], [0, 0], [0.5, 2], [0, 0]]))
        assert sorted(model.state_dict()) != sorted(state[own])
        assert torch.equal(model.top.bias, torch.tensor([7.0]))
