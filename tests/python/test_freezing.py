"""Freezing and thawing: every module, in every way that works on `nn.Embedding` and `nn.EmbeddingBag`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import IDS, KINDS, NUM, OFFSETS, OPTIONS, Kind, Pair, each_kind, pair
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    Table,
    embedding,
)

__all__ = ["pair"]

pytestmark = pytest.mark.tier("test")

Freeze = Callable[[nn.Module, nn.Module, bool], Any]


def _over_parameters(model: nn.Module, module: nn.Module, requires_grad: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad = requires_grad


def _over_names(model: nn.Module, module: nn.Module, requires_grad: bool) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith("0."):
            parameter.requires_grad_(requires_grad)


def _weights(module: Any) -> list[Any]:
    if hasattr(module, "weight"):
        return [module.weight]
    return [each.weight for each in getattr(module, "embedding_bags", getattr(module, "embeddings", {})).values()]


def _by_weight(model: nn.Module, module: nn.Module, requires_grad: bool) -> None:
    for weight in _weights(module):
        weight.requires_grad = requires_grad


def _by_method_of_weight(model: nn.Module, module: nn.Module, requires_grad: bool) -> None:
    for weight in _weights(module):
        assert weight.requires_grad_(requires_grad).requires_grad is requires_grad


WAYS: dict[str, Freeze] = {
    "module.requires_grad_": lambda model, module, requires_grad: module.requires_grad_(requires_grad),
    "model.requires_grad_": lambda model, module, requires_grad: model.requires_grad_(requires_grad),
    "parameters": _over_parameters,
    "named_parameters of the model": _over_names,
    "weight.requires_grad": _by_weight,
    "weight.requires_grad_": _by_method_of_weight,
}


@each_kind
@pytest.mark.parametrize("freeze", WAYS.values(), ids=WAYS.keys())
def test_frozen_rows_get_no_gradient_until_they_are_thawed(pair: Pair, freeze: Freeze) -> None:
    pair.backward()
    pair.step()
    for optimizer in (pair.optimizer, torch.optim.SGD(pair.rival.parameters())):
        optimizer.zero_grad()

    freeze(pair.model, pair.module, False)
    freeze(pair.rival_model, pair.rival, False)
    outputs = pair.outputs()
    assert [each.requires_grad for each in outputs] == [False, False]
    assert [each.grad_fn for each in outputs] == [None, None]
    assert [parameter.requires_grad for parameter in pair.module.parameters()] == [False]
    pair.top.requires_grad_(True)
    pair.rival_top.requires_grad_(True)
    pair.backward()
    assert not pair.table.has_collected()
    pair.step()
    pair.assert_equal_rows()

    freeze(pair.model, pair.module, True)
    freeze(pair.rival_model, pair.rival, True)
    pair.backward()
    pair.step()
    pair.assert_equal_rows()
    assert pair.rows()[1].tolist() == [-2.0, -2.0]


@each_kind
def test_gradients_collected_before_freezing_are_applied(pair: Pair) -> None:
    pair.backward()
    for module in (pair.module, pair.rival):
        module.requires_grad_(False)
    pair.step()
    pair.assert_equal_rows()
    assert pair.rows()[1].tolist() == [-1.0, -1.0]


@each_kind
@pytest.mark.parametrize("compiles", [False, True])
def test_rows_that_are_frozen_before_backward_get_no_gradient(
    kind: Kind, compiles: bool, table_name: Callable[[], str]
) -> None:
    module, rival = kind.open(table_name()), kind.rival()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        ours = (torch.compile(kind.outputs, backend="aot_eager") if compiles else kind.outputs)(module)
        theirs = kind.of_rival(rival)
        for each, output in ((module, ours), (rival, theirs)):
            each.requires_grad_(False)
            output.sum().backward()
    assert rival.weight.grad is None
    assert not module.tables()[0].has_collected()


@each_kind
def test_pickles_stay_frozen(kind: Kind, table_name: Callable[[], str]) -> None:
    module = kind.open(table_name())
    module.requires_grad_(False)
    other = pickle.loads(pickle.dumps(module))
    assert not kind.outputs(other).requires_grad
    other.requires_grad_(True)
    assert kind.outputs(other).requires_grad
    assert not kind.outputs(module).requires_grad


def test_a_pickle_that_kept_frozen_as_an_attribute_is_frozen(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, 2, table_name(), **OPTIONS)
    state = {**module.__dict__, "frozen": True, "_parameters": {}}
    older = DistEmbedding.__new__(DistEmbedding)
    older.__setstate__(state)
    assert older.frozen
    assert [parameter.requires_grad for parameter in older.parameters()] == [False]


@each_kind
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_and_eager_agree(kind: Kind, backend: str, table_name: Callable[[], str]) -> None:
    eager, twin = Pair(kind, table_name()), Pair(kind, table_name())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(kind.outputs, backend=backend)
        for requires_grad in (True, False, True):
            for each in (eager, twin):
                each.module.requires_grad_(requires_grad)
            outputs = kind.outputs(eager.module), compiled(twin.module)
            assert torch.equal(*outputs)
            assert [each.requires_grad for each in outputs] == [requires_grad] * 2
            for each, output in zip((eager, twin), outputs, strict=True):
                if requires_grad:
                    output.sum().backward()
                assert each.table.has_collected() == requires_grad
                each.optimizer.step()
            assert torch.equal(eager.rows(), twin.rows())


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind", ["DistEmbeddingBag", "RecStoreEmbeddingBagCollection"])
def test_weights_of_frozen_rows_get_their_gradient(kind: str, compiles: bool, table_name: Callable[[], str]) -> None:
    module = KINDS[kind].open(table_name())
    module.tables()[0].requires_grad = False
    weight = _weights(module)[0]
    weight[torch.arange(NUM)] = torch.arange(float(NUM)).unsqueeze(1).expand(NUM, 2)
    weights = torch.ones(3, requires_grad=True)

    def outputs(weights: Tensor) -> Tensor:
        if kind == "DistEmbeddingBag":
            return module(IDS, OFFSETS, weights)
        return module(KeyedJaggedTensor(["seen"], IDS, weights=weights, lengths=torch.tensor([2, 1])))

    torch._dynamo.reset()
    (torch.compile(outputs, backend="aot_eager") if compiles else outputs)(weights).sum().backward()

    assert weights.grad is not None
    assert weights.grad.tolist() == [2.0, 4.0, 4.0]
    assert not module.tables()[0].has_collected()


def open_two(name: str, **options: Any) -> RecStoreEmbeddingBagCollection:
    tables = [
        {"name": f"{name}/{key}", "num_embeddings": NUM, "embedding_dim": dim, "feature_names": features}
        for key, dim, features in (("a", 2, ["first", "third"]), ("b", 3, ["second"]))
    ]
    return RecStoreEmbeddingBagCollection(tables, **options, **OPTIONS)


THREE = KeyedJaggedTensor(
    ["third", "second", "first"], torch.tensor([1, 2, 2, 3, 4, 1]), lengths=torch.tensor([1, 1, 0, 3, 1, 0])
)


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("frozen", ["a", "b"])
def test_a_collection_trains_the_tables_that_are_not_frozen(
    frozen: str, has_weights: bool, prefetches: bool, table_name: Callable[[], str]
) -> None:
    names = table_name(), table_name()
    ours, expected = (open_two(name) for name in names)
    weights = [torch.arange(1.0, 7.0, requires_grad=has_weights) for _ in names]
    for name, bags, own in zip(names, (ours, expected), weights, strict=True):
        for bag in bags.embedding_bags.values():
            bag.weight[torch.arange(NUM)] = torch.arange(float(NUM)).unsqueeze(1).expand(NUM, bag.embedding_dim)
        if bags is ours:
            bags.embedding_bags[f"{name}/{frozen}"].requires_grad_(False)
        batch = KeyedJaggedTensor(
            THREE.keys(), THREE.values(), weights=own if has_weights else None, lengths=THREE.lengths()
        )
        if prefetches:
            bags.issue_fused_prefetch(batch)
        (bags(batch).values() * torch.arange(14.0).view(2, 7)).sum().backward()

    collected = {name.removeprefix(names[0]): grads for name, _, grads in ours._trace}
    wanted = {name.removeprefix(names[1]): grads for name, _, grads in expected._trace}
    del wanted[f"/{frozen}"]
    assert collected.keys() == wanted.keys()
    assert all(torch.equal(collected[name], wanted[name]) for name in wanted)
    if has_weights:
        assert weights[0].grad is not None
        assert weights[1].grad is not None
        assert torch.equal(weights[0].grad, weights[1].grad)


def test_from_pretrained_thaws(table_name: Callable[[], str]) -> None:
    module = DistEmbedding.from_pretrained(torch.ones(NUM, 2), table_name())
    assert module.frozen
    module.requires_grad_(True)
    assert not module.frozen
    assert module(IDS).requires_grad


def test_a_bag_takes_frozen_as_an_embedding_does(table_name: Callable[[], str]) -> None:
    bag = DistEmbeddingBag(NUM, 2, table_name(), **OPTIONS)
    bag.frozen = True
    assert not bag(IDS, OFFSETS).requires_grad


def test_modules_over_one_table_are_frozen_one_by_one(table_name: Callable[[], str]) -> None:
    name = table_name()
    first, second = (DistEmbedding(NUM, 2, name, **OPTIONS) for _ in range(2))
    first.requires_grad_(False)
    assert (first(IDS).requires_grad, second(IDS).requires_grad) == (False, True)


def test_an_open_table_is_frozen_for_the_functional_forms(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), 2)
    table.requires_grad = False
    assert not embedding(IDS, table).requires_grad


def train_partly_frozen(group: ProcessGroup | None, name: str) -> tuple[list[list[float]], bool]:
    bags = open_two(name, process_group=group, grad_reduce="sum") if group is not None else open_two(name)
    optimizer = SparseOptimizer(modules=[bags])
    bags.embedding_bags[f"{name}/a"].requires_grad_(False)
    bags(THREE).values().sum().backward()
    is_collected = bags.embedding_bags[f"{name}/a"].table.has_collected()
    optimizer.step()
    bags.requires_grad_(False)
    output = bags(THREE).values()
    assert not output.requires_grad
    return output.tolist(), is_collected


def test_sharded_tables_freeze(ranks: Ranks, table_name: Callable[[], str]) -> None:
    alone, _ = train_partly_frozen(None, table_name())
    twice = torch.tensor(alone) * 2  # Both ranks train on the same batch.
    for rows, is_collected in ranks.run(2, train_partly_frozen, table_name()):
        assert torch.equal(torch.tensor(rows), twice)
        assert not is_collected


def train_under_ddp(group: ProcessGroup, name: str) -> list[str]:
    model = nn.Sequential(DistEmbedding(NUM, 2, name, process_group=group, **OPTIONS), nn.Linear(2, 1))
    wrapped = DistributedDataParallel(model, process_group=group)
    for _ in range(3):  # DDP complains in the second backward pass of a parameter that it waited for in the first.
        wrapped(IDS).sum().backward()
    return [parameter_name for parameter_name, _ in wrapped.named_parameters()]


def test_ddp_does_not_wait_for_the_stand_in_of_a_table(ranks: Ranks, table_name: Callable[[], str]) -> None:
    names = ["module.0.weight", "module.1.weight", "module.1.bias"]
    assert ranks.run(2, train_under_ddp, table_name()) == [names, names]


def test_frozen_lookups_are_those_without_gradients(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, 2, table_name(), **OPTIONS)
    module.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):  # type: ignore[arg-type]
        module(IDS)
