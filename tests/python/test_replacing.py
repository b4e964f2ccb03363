"""`replace_embeddings` and `restore_embeddings`: models of torch over tables, beside the same models as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    NGramMemory,
    RecStoreEmbeddingCollection,
    checkpoint,
    replace_embeddings,
    restore_embeddings,
    table_names,
)

pytestmark = [pytest.mark.tier("quick"), pytest.mark.usefixtures("tables_are_dropped")]

STEPS, BATCH, TOLERANCE = 100, 8, 1e-5

OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({"kind": "sgd", "lr": 0.1}, lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (
        {"kind": "adagrad", "lr": 0.1, "convention": "torch"},
        lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are so small that threads of torch would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prefix(table_name: Callable[[], str]) -> str:
    return f"{table_name()}/"


def ids(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape)


class Clicks(nn.Module):
    """Features with a weight each and a vector each, bags of weighted ids, and a net above, as DLRM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Embedding(size, 1) for size in (30, 20)])
        self.vectors = nn.ModuleDict({"user": nn.Embedding(30, 4), "item": nn.Embedding(20, 4, sparse=True)})
        self.tags = nn.EmbeddingBag(15, 4, mode="sum", padding_idx=3)
        self.words = nn.EmbeddingBag(9, 4, mode="mean", include_last_offset=True)
        self.kinds = nn.EmbeddingBag(5, 4, mode="max")
        self.top = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 1))

    def batch(self) -> dict[str, Tensor]:
        tags = torch.stack([torch.randperm(15)[:3] for _ in range(BATCH)])
        words = {"words": ids(9, 2 * BATCH), "offsets": torch.arange(BATCH + 1) * 2}
        return {"user": ids(30, BATCH), "item": ids(20, BATCH), "tags": tags, "weights": torch.rand(BATCH, 3), **words}

    def forward(
        self, user: Tensor, item: Tensor, tags: Tensor, weights: Tensor, words: Tensor, offsets: Tensor
    ) -> Tensor:
        pooled = [
            self.tags(tags, per_sample_weights=weights),
            self.words(words, offsets),
            self.kinds(tags % 5),
        ]
        vectors = [self.vectors["user"](user), self.vectors["item"](item), *pooled]
        first = self.linear[0](user) + self.linear[1](item)
        return first + self.top(torch.cat(vectors, dim=1))


class Towers(nn.Module):
    """Two towers whose embeddings of items share a weight, with another padding id in one, as a history has."""

    def __init__(self) -> None:
        super().__init__()
        self.user: Any = nn.Embedding(12, 4)
        self.items: Any = nn.Embedding(25, 4)
        self.history: Any = nn.Embedding(25, 4, padding_idx=0)
        self.history.weight = self.items.weight
        self.query = nn.Linear(8, 4)

    def batch(self) -> dict[str, Tensor]:
        return {"user": ids(12, BATCH), "seen": ids(25, BATCH, 3), "item": ids(25, BATCH)}

    def forward(self, user: Tensor, seen: Tensor, item: Tensor) -> Tensor:
        query = self.query(torch.cat([self.user(user), self.history(seen).mean(1)], dim=1))
        return (query * self.items(item)).sum(1, keepdim=True)


class Sessions(nn.Module):
    """A recurrent net over padded sessions, whose gradients are scaled by frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 4, padding_idx=-1, scale_grad_by_freq=True)
        self.frozen = nn.Embedding.from_pretrained(torch.randn(20, 4))
        self.net = nn.GRU(4, 6, batch_first=True)
        self.top = nn.Linear(6, 1)

    def batch(self) -> dict[str, Tensor]:
        return {"seen": ids(20, BATCH, 5)}

    def forward(self, seen: Tensor) -> Tensor:
        return self.top(self.net(self.items(seen) + self.frozen(seen))[1][0])


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(10, 4)
        self.inner = nn.ModuleDict({"again": self.first})
        self.top = nn.Linear(8, 1)

    def batch(self) -> dict[str, Tensor]:
        return {"one": ids(10, BATCH), "other": ids(10, BATCH)}

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.top(torch.cat([self.first(one), self.inner["again"](other)], dim=1))


MODELS: list[Callable[[], Any]] = [Clicks, Towers, Sessions, Twice]


def losses(model: Any, optimizers: list[torch.optim.Optimizer], steps: int = STEPS) -> Tensor:
    """The loss of each step."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        batch = model.batch()
        loss = nn.functional.binary_cross_entropy_with_logits(model(**batch), torch.randint(2, (BATCH, 1)).float())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def of_torch(weights: Any, name: str) -> list[torch.optim.Optimizer]:
    # torch.optim refuses parameters of one kind of gradients in an optimizer of the other.
    return [OPTIMIZERS[name][1]([weight]) for weight in weights if weight.requires_grad]


def rows_of(module: Any, size: int) -> Tensor:
    return module.weight[torch.arange(size)]


@pytest.mark.parametrize("grows", [False, pytest.param(True, marks=pytest.mark.tier("all"))])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", MODELS)
def test_a_model_trains_as_it_would_have(make: Callable[[], Any], name: str, grows: bool, prefix: str) -> None:
    torch.manual_seed(0)
    original = make()
    model = copy.deepcopy(original)
    replaced = replace_embeddings(model, prefix=prefix, grows=grows, optimizer=OPTIMIZERS[name][0])
    dense = of_torch(replaced.dense_parameters(), name)
    expected = losses(original, of_torch(original.parameters(), name))
    torch.testing.assert_close(losses(model, [replaced.optimizer, *dense]), expected, rtol=0, atol=TOLERANCE)
    assert expected[-10:].mean() != expected[:10].mean()

    sizes = {path: weight.shape[0] for path, weight in of_paths(original).items()}
    restore_embeddings(model, num_embeddings=sizes)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in original.named_parameters()]
    for (path, weight), other in zip(original.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=0, atol=TOLERANCE, msg=path)
        assert other.requires_grad == weight.requires_grad
    torch.testing.assert_close(
        losses(model, of_torch(model.parameters(), "sgd")),
        losses(original, of_torch(original.parameters(), "sgd")),
        rtol=0,
        atol=TOLERANCE,
    )


def of_paths(model: nn.Module) -> dict[str, Tensor]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {path: module.weight for path, module in model.named_modules() if isinstance(module, kinds)}


def test_what_is_given_back_names_tables_and_leaves_dense_parameters(prefix: str) -> None:
    model = Towers()
    weight = model.items.weight.detach().clone()
    replaced = replace_embeddings(model, prefix=prefix)
    tables = {"user": f"{prefix}user", "items": f"{prefix}items", "history": f"{prefix}items"}
    assert replaced.tables == tables
    assert set(table_names()) >= set(tables.values())
    assert [id(each) for each in replaced.dense_parameters()] == [id(each) for each in model.query.parameters()]
    assert replaced.model is model
    assert [group["table"] for group in replaced.optimizer.param_groups] == [f"{prefix}user", f"{prefix}items"]
    assert isinstance(model.items, DistEmbedding)
    assert isinstance(model.history, DistEmbedding)
    assert (model.items.padding_idx, model.history.padding_idx) == (None, 0)
    assert torch.equal(rows_of(model.items, 25), weight)
    assert torch.equal(rows_of(model.history, 25), weight)


@pytest.mark.parametrize(
    ("include", "paths"),
    [
        ("*user*", ["vectors.user"]),
        (["vectors.*", "tags"], ["vectors.user", "vectors.item", "tags"]),
        (lambda path, module: module.weight.shape[0] >= 20 and "linear" not in path, ["vectors.user", "vectors.item"]),
    ],
)
def test_patterns_and_functions_choose(include: Any, paths: list[str], prefix: str) -> None:
    model = Clicks()
    replaced = replace_embeddings(model, include=include, prefix=prefix)
    assert list(replaced.tables) == paths
    kinds = {path for path, module in model.named_modules() if isinstance(module, DistEmbedding | DistEmbeddingBag)}
    assert kinds == set(paths)
    restore_embeddings(model, include=paths[0])
    assert not isinstance(model.get_submodule(paths[0]), DistEmbedding | DistEmbeddingBag)
    assert all(isinstance(model.get_submodule(path), DistEmbedding | DistEmbeddingBag) for path in paths[1:])


def test_a_table_without_bound_takes_new_ids_while_training_goes_on(prefix: str) -> None:
    torch.manual_seed(0)
    model = Towers()
    replaced = replace_embeddings(model, prefix=prefix, grows=True, optimizer="adagrad", lr=0.1)
    losses(model, [replaced.optimizer], 3)
    new = torch.tensor([25, 2**62, -7])
    before = model.items(new).detach()
    batch = {"user": torch.tensor([12, 13, 14]), "seen": new.unsqueeze(1), "item": new}
    model(**batch).sum().backward()
    replaced.optimizer.step()
    assert not torch.equal(model.items(new), before)
    assert set(new.tolist()) < set(model.items.ids().tolist())
    assert len(model.items.table) == 28


def test_a_table_with_the_bound_of_its_weight_refuses_ids_beyond(prefix: str) -> None:
    model = Towers()
    replace_embeddings(model, prefix=prefix)
    with pytest.raises(IndexError, match="25"):
        model.items(torch.tensor([25]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_training_mode_and_rows_of_padding_stay(dtype: torch.dtype, prefix: str) -> None:
    model: Any = nn.Sequential(nn.Embedding(6, 4, padding_idx=2, dtype=dtype)).eval()
    with torch.no_grad():
        model[0].weight[2] = 3.0
    before = model(torch.arange(6))
    replace_embeddings(model, prefix=prefix)
    assert torch.equal(model(torch.arange(6)), before)
    assert not model[0].training
    restore_embeddings(model)
    assert torch.equal(model(torch.arange(6)), before)
    assert (model[0].padding_idx, model[0].training, model[0].weight.dtype) == (2, False, dtype)


def test_a_class_that_adds_a_constructor_only_is_an_embedding(prefix: str) -> None:
    class Token(nn.Embedding):
        def __init__(self, size: int) -> None:
            super().__init__(size, 4, padding_idx=0)

    model = nn.Sequential(Token(5))
    replace_embeddings(model, prefix=prefix)
    assert isinstance(model[0], DistEmbedding)
    assert model[0].padding_idx == 0


def test_states_of_the_model_before_load_into_the_model_after(prefix: str) -> None:
    model = Towers()
    state = Towers().state_dict()
    replace_embeddings(model, prefix=prefix)
    model.load_state_dict(state)
    assert torch.equal(rows_of(model.items, 25), state["items.weight"])
    own = model.state_dict()
    assert {"user.ids", "user.rows", "items.rows", "history.rows"} < own.keys()
    other = Towers()
    replace_embeddings(other, prefix=f"{prefix}other/")
    other.load_state_dict(own)
    assert torch.equal(rows_of(other.user, 12), state["user.weight"])


@pytest.mark.embedded_only("tables on servers cannot be copied")
def test_a_model_copied_with_its_optimizer_trains_alike(prefix: str) -> None:
    model = Towers()
    replaced = replace_embeddings(model, prefix=prefix, optimizer=OPTIMIZERS["sgd"][0])
    twin, optimizer = copy.deepcopy((model, replaced.optimizer))
    assert torch.equal(losses(twin, [optimizer], 5), losses(model, [replaced.optimizer], 5))


def test_a_compiled_model_trains_as_the_one_in_eager_mode(prefix: str) -> None:
    torch.manual_seed(0)
    original = Towers()
    model = copy.deepcopy(original)
    replaced = replace_embeddings(model, prefix=prefix, optimizer=OPTIMIZERS["sgd"][0])
    dense = of_torch(replaced.dense_parameters(), "sgd")
    model.compile(backend="aot_eager", fullgraph=True)
    expected = losses(original, of_torch(original.parameters(), "sgd"), 5)
    torch.testing.assert_close(losses(model, [replaced.optimizer, *dense], 5), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.embedded_only("servers drop no table for on_existing")
def test_a_table_that_exists_is_shared_or_begun_anew_where_that_is_said(prefix: str) -> None:
    model = Towers()
    replace_embeddings(model, prefix=prefix)
    rows = rows_of(model.items, 25)
    other = Towers()
    weight = other.items.weight.detach().clone()
    with pytest.raises(ValueError, match=f'table "{prefix}user" exists: give another prefix, or on_existing="share"'):
        replace_embeddings(other, prefix=prefix)
    assert isinstance(other.items, nn.Embedding)
    shared = copy.deepcopy(other)
    replace_embeddings(shared, prefix=prefix, on_existing="share")
    assert torch.equal(rows_of(shared.items, 25), rows)
    restore_embeddings(shared)
    restore_embeddings(model)
    replace_embeddings(other, prefix=prefix, on_existing="reset")
    assert torch.equal(rows_of(other.items, 25), weight)


def test_tables_of_a_checkpoint_are_gone_on_with(prefix: str, tmp_path: Any) -> None:
    model = Towers()
    replace_embeddings(model, prefix=prefix)
    rows = rows_of(model.user, 12)
    checkpoint.save(tmp_path / "saved")
    restore_embeddings(model, drop_tables=True)
    assert f"{prefix}user" not in table_names()
    checkpoint.load(tmp_path / "saved")
    again = Towers()
    replace_embeddings(again, prefix=prefix, on_existing="share")
    assert torch.equal(rows_of(again.user, 12), rows)


def test_modules_with_two_padding_ids_share_a_table_with_eviction(prefix: str) -> None:
    model = Towers()
    model.items.padding_idx = 5
    replace_embeddings(model, prefix=prefix, eviction={"ttl": 9})
    assert model.items.table.config.eviction == {"ttl": 9, "keep": [0, 5]}
    assert model.history.table.table_id == model.items.table.table_id


# What is refused: what is done to a model of two embeddings and a layer, and what the error says of it.


class Forward(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user: Any = nn.Embedding(6, 4)
        self.item: Any = nn.Embedding(6, 4)
        self.top: Any = nn.Linear(4, 6, bias=False)


def with_user(user: nn.Module) -> Model:
    model = Model()
    model.user = user
    return model


def tied_to_a_layer() -> Model:
    model = Model()
    model.top.weight = model.user.weight
    return model


def in_a_parameter_list() -> Model:
    model = Model()
    model.top = nn.ParameterList([model.user.weight])
    return model


def with_memory_of_another() -> Model:
    model = Model()
    model.item.weight = nn.Parameter(model.user.weight.detach()[2:])
    return model


def with_hook() -> Model:
    model = Model()
    model.user.register_forward_hook(lambda *args: None)
    return model


def with_gradient_hook() -> Model:
    model = Model()
    model.user.weight.register_hook(lambda grad: grad)
    return model


def parametrized() -> Model:
    model = Model()
    parametrize.register_parametrization(model.user, "weight", nn.Tanh())
    return model


def normed() -> Model:
    model = Model()
    weight_norm(model.user)
    return model


def pruned() -> Model:
    model = Model()
    prune.l1_unstructured(model.user, "weight", 1)
    return model


def with_attribute() -> Model:
    model = Model()
    model.user.label = "user"
    return model


def with_own_forward() -> Model:
    model = Model()
    model.user.forward = lambda ids: ids
    return model


def with_gradient() -> Model:
    model = Model()
    model.user(torch.tensor([1])).sum().backward()
    return model


def of_values(value: float) -> Model:
    model = Model()
    with torch.no_grad():
        model.user.weight[3, 1] = value
    return model


def in_a_list() -> Model:
    model = Model()
    model.all = [{"user": model.user}]  # type: ignore[assignment]
    return model


def lazy() -> Model:
    model = Model()
    model.user.weight = nn.UninitializedParameter()
    return model


class FakeWrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def wrapped(name: str) -> nn.Module:
    """A module within a class of torch's name, for those that need a job or devices."""
    kind = type(name, (FakeWrapper,), {"__module__": "torch.distributed"})
    return kind(Model())


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "max_norm": (lambda: with_user(nn.Embedding(6, 4, max_norm=1.0)), '"user": max_norm changes rows when they are'),
    "a tied layer": (tied_to_a_layer, '"user": its weight is also "top.weight" of Linear, which stays'),
    "a list of parameters": (in_a_parameter_list, '"user": its weight is also "top.0" of ParameterList, which stays'),
    "shared memory": (with_memory_of_another, 'its weight shares memory with "item.weight", and is another tensor'),
    "float64": (lambda: with_user(nn.Embedding(6, 4).double()), '"user": a table is made of .*, and its weight is to'),
    "meta": (lambda: with_user(nn.Embedding(6, 4, device="meta")), '"user": its weight is on the meta device, without'),
    "no weight yet": (lazy, '"user": its weight is not initialized yet'),
    "a hook": (with_hook, r'"user": it has hooks \(_forward_hooks\): remove them'),
    "a gradient hook": (with_gradient_hook, '"user": its weight has gradient hooks, which no table calls'),
    "a parametrization": (
        parametrized,
        '"user": its class ParametrizedEmbedding has|"user": it has .*parametrizations',
    ),
    "a norm": (normed, '"user": .*parametrizations'),
    "pruning": (pruned, r'"user": it has \[.weight_orig., .weight_mask.\] where a table has its weight alone'),
    "a class": (lambda: with_user(Forward(6, 4)), r'"user": its class Forward has \[.forward.\] of its own'),
    "an attribute": (with_attribute, r'"user": it has the attributes \[.label.\]'),
    "a forward of its own": (with_own_forward, r'"user": it has the attributes \[.forward.\]'),
    "a gradient": (with_gradient, '"user": its weight has a gradient: step and zero_grad first'),
    "NaN": (lambda: of_values(float("nan")), '"user": its weight is not finite'),
    "infinity": (lambda: of_values(float("-inf")), '"user": its weight is not finite'),
    "a list": (in_a_list, '"user": all holds the module too, and would keep it'),
    "DataParallel": (lambda: nn.DataParallel(Model()), '"module.user": it is within DataParallel: replace before it'),
    "DDP": (lambda: wrapped("DistributedDataParallel"), "within DistributedDataParallel: replace before it is wrapped"),
    "FSDP": (lambda: wrapped("FullyShardedDataParallel"), "within FullyShardedDataParallel: replace before it is sh"),
    "compiled": (lambda: torch.compile(Model()), '"_orig_mod.user": it is within OptimizedModule: replace before'),  # type: ignore[dict-item, return-value]
}


def state_of(model: nn.Module) -> list[Any]:
    """What must not change."""
    parameters = [(name, id(each)) for name, each in model.named_parameters(remove_duplicate=False)]
    return [parameters, [(path, id(module)) for path, module in model.named_modules()], sorted(table_names())]


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_table_can_be_is_refused_by_its_path_and_nothing_changes(name: str, prefix: str) -> None:
    make, message = REFUSED[name]
    model = make()
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        replace_embeddings(model, prefix=prefix)
    assert state_of(model) == before


def test_all_reasons_are_told_at_once(prefix: str) -> None:
    model = nn.ModuleDict({"user": nn.Embedding(3, 2, max_norm=1.0), "item": Forward(3, 2), "kind": nn.Embedding(3, 2)})
    with pytest.raises(ValueError, match=r'ModuleDict stays as it is: "user": max_norm .*; "item": its class Forward'):
        replace_embeddings(model, prefix=prefix)
    replace_embeddings(model, include="kind", prefix=prefix)
    assert isinstance(model["kind"], DistEmbedding)


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ("*.users*", r"the pattern \"\*.users\*\" matches none of \['user', 'item'\]"),
        (["user", "tag"], r"the pattern \"tag\" matches none of \['user', 'item'\]"),
        ([], r"include has no patterns, and there are \['user', 'item'\]"),
        (lambda path, module: False, r"include chooses none of \['user', 'item'\]"),
    ],
)
def test_an_include_that_chooses_nothing_is_refused_with_the_paths(include: Any, message: str, prefix: str) -> None:
    model = Model()
    before = state_of(model)
    with pytest.raises(ValueError, match=f"replace_embeddings: {message}"):
        replace_embeddings(model, include=include, prefix=prefix)
    assert state_of(model) == before


def test_a_weight_tied_to_an_embedding_that_is_left_out_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match=r'"history": its weight is also "items\.weight" of Embedding, which stays'):
        replace_embeddings(Towers(), include="history", prefix=prefix)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), ValueError, "Sequential has no nn.Embedding or nn.EmbeddingBag among its"),
        (nn.Embedding(2, 2), ValueError, "the model is itself a Embedding, .*from_embedding makes"),
        ([nn.Embedding(2, 2)], TypeError, "replace_embeddings takes a module of torch, got list"),
    ],
)
def test_what_has_no_embedding_within_is_refused(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace_embeddings(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": "sdg"}, ValueError, "sdg"),
        ({"optimiser": "sgd"}, TypeError, r"unexpected keyword argument 'optimiser'. Did you mean 'optimizer'\?"),
        ({"lr": -1.0}, ValueError, "-1"),
        ({"on_existing": "anew"}, ValueError, "on_existing must be"),
    ],
)
def test_options_are_those_of_a_table(options: Any, error: type[Exception], message: str, prefix: str) -> None:
    model = Model()
    before = state_of(model)
    with pytest.raises(error, match=message):
        replace_embeddings(model, prefix=prefix, **options)
    assert state_of(model) == before


@pytest.mark.embedded_only("a limit of memory is one of this process")
def test_an_error_after_the_first_table_drops_it_again(prefix: str) -> None:
    model = nn.ModuleDict({"small": nn.Embedding(6, 4), "large": nn.Embedding(100_000, 64)})
    before = state_of(model)
    with pytest.raises(RuntimeError, match="memory limit of 4194304 bytes"):
        replace_embeddings(model, prefix=prefix, memory_limit=4 << 20)
    assert state_of(model) == before


def test_two_tables_of_one_name_are_refused(prefix: str) -> None:
    model = nn.Module()
    model.add_module("a", nn.ModuleDict({"b": nn.Embedding(3, 2)}))
    model._modules["a.b"] = nn.Embedding(3, 2)
    with pytest.raises(ValueError, match=f'would give two tables the name "{prefix}a.b"'):
        replace_embeddings(model, prefix=prefix)


@pytest.mark.parametrize(
    "held", [lambda model: [("user", model.user.weight)], lambda m: torch.optim.SGD(m.parameters())]
)
def test_a_weight_that_an_attribute_holds_too_is_warned_of(held: Callable[[Model], Any], prefix: str) -> None:
    model = Model()
    model.optim = held(model)
    with pytest.warns(UserWarning, match="optim holds a weight that a table takes the place of, and changes") as caught:
        replace_embeddings(model, prefix=prefix)
    assert [each.filename for each in caught] == [__file__]


# The way back.


def replaced_model(prefix: str, **options: Any) -> Model:
    model = Model()
    replace_embeddings(model, prefix=prefix, **options)
    return model


def with_several_paddings(prefix: str) -> Model:
    return with_user(DistEmbedding(6, 4, f"{prefix}user", padding_idx=[0, 1]))


def with_collected(prefix: str) -> Model:
    model = replaced_model(prefix)
    model.user(torch.tensor([1])).sum().backward()
    return model


def with_hook_on_table(prefix: str) -> Model:
    model = replaced_model(prefix)
    model.user.register_forward_pre_hook(lambda *args: None)
    return model


def with_one_frozen(prefix: str) -> Model:
    model = with_user(DistEmbedding(6, 4, f"{prefix}user"))
    model.item = DistEmbedding(6, 4, f"{prefix}user")
    model.item.requires_grad_(False)
    return model


def with_class(prefix: str) -> Model:
    class Own(DistEmbedding):
        pass

    return with_user(Own(6, 4, f"{prefix}user"))


def with_table_in_a_list(prefix: str) -> Model:
    model = replaced_model(prefix)
    model.all = (model.user,)  # type: ignore[assignment]
    return model


def with_new_id(prefix: str) -> Model:
    model = replaced_model(prefix, grows=True)
    model.user.weight[[9]] = torch.ones(1, 4)
    return model


NOT_RESTORED: dict[str, tuple[Callable[[str], nn.Module], dict[str, Any], str]] = {
    "no bound": (lambda p: replaced_model(p, grows=True), {}, '"user": its table has no num_embeddings: say how many'),
    "one of two bounds": (
        lambda p: replaced_model(p, grows=True),
        {"num_embeddings": {"user": 6}},
        '"item": its table has no num_embeddings: say how many',
    ),
    "an id beyond": (
        with_new_id,
        {"num_embeddings": 9},
        '"user": its table has a row of the id 9, which is not within',
    ),
    "no rows": (with_new_id, {"num_embeddings": 0}, '"user": num_embeddings must be at least 1, got 0'),
    "padding beyond": (
        lambda p: with_user(DistEmbedding(None, 4, f"{p}user", padding_idx=-3)),
        {"num_embeddings": 6, "include": "user"},
        '"user": its table has a row of the id -3|"user": its padding_idx -3 is not within',
    ),
    "several paddings": (with_several_paddings, {}, r'"user": torch takes one padding id, and it has \(0, 1\)'),
    "gradients": (with_collected, {}, '"user": it has collected gradients: step and zero_grad first'),
    "a hook": (with_hook_on_table, {}, '"user": it has hooks'),
    "one frozen": (with_one_frozen, {}, '"item": it shares a table with "user", and frozen True is not False'),
    "a class": (with_class, {}, '"user": it is a Own, and only DistEmbedding and DistEmbeddingBag are restored'),
    "a list": (with_table_in_a_list, {}, '"user": all holds the module too, and would keep it'),
    "a collection": (
        lambda p: with_user(
            RecStoreEmbeddingCollection([{"name": f"{p}user", "num_embeddings": 6, "embedding_dim": 4}])
        ),
        {},
        '"user": it is a RecStoreEmbeddingCollection, and only',
    ),
    "n-grams": (
        lambda p: with_user(NGramMemory(4, 8, 4, f"{p}user")),
        {},
        '"user": it is a NGramMemory, and only',
    ),
    "a hash table": (lambda p: with_user(HashTable(4, name=f"{p}user")), {}, '"user": it is a HashTable, and only'),
}


@pytest.mark.parametrize("name", NOT_RESTORED)
def test_what_torch_cannot_be_is_refused_by_its_path_and_nothing_changes(name: str, prefix: str) -> None:
    make, options, message = NOT_RESTORED[name]
    model = make(prefix)
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        restore_embeddings(model, **options)
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Sequential(nn.Embedding(2, 2)), ValueError, "Sequential has no DistEmbedding or DistEmbeddingBag among"),
        ([], TypeError, "restore_embeddings takes a module of torch, got list"),
    ],
)
def test_what_has_no_table_within_is_refused(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        restore_embeddings(model)


def test_a_module_over_a_table_is_no_model(prefix: str) -> None:
    with pytest.raises(ValueError, match="the model is itself a DistEmbedding, and nothing holds it"):
        restore_embeddings(DistEmbedding(3, 2, f"{prefix}user"))


def test_a_table_that_grew_is_restored_with_the_rows_that_are_asked_for(prefix: str) -> None:
    model = with_new_id(prefix)
    initial = model.user.weight[[8]]
    restore_embeddings(model, num_embeddings={"user": 12, "item": 6})
    assert isinstance(model.user, nn.Embedding)
    assert (model.user.num_embeddings, model.item.num_embeddings) == (12, 6)
    assert torch.equal(model.user.weight[9], torch.ones(4))
    assert torch.equal(model.user.weight[8], initial[0])


def test_tables_stay_unless_they_are_to_be_dropped(prefix: str) -> None:
    model = replaced_model(prefix)
    restore_embeddings(model)
    assert f"{prefix}user" in table_names()
    replace_embeddings(model, prefix=f"{prefix}again/")
    restore_embeddings(model, drop_tables=True)
    assert not [name for name in table_names() if name.startswith(f"{prefix}again/")]


def test_rows_come_back_to_a_module_made_on_the_meta_device(prefix: str) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(DistEmbedding(4, 2, f"{prefix}0"))
    rows = rows_of(model[0], 4)
    restore_embeddings(model)
    assert torch.equal(model[0].weight, rows)
