"""Averages of models take the rows of their tables along, as `torch` averages those of `nn.Embedding`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import DIM, NUM, Kind, Pair, each_kind, pair
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from recstore_ops import DistEmbedding, SparseOptimizer

__all__ = ["pair"]

pytestmark = [pytest.mark.tier("test"), pytest.mark.embedded_only("tables on servers cannot be copied")]

# torch does not export them to type checkers.
foreach_lerp_, foreach_maximum, foreach_mul_ = (
    getattr(torch, f"_foreach_{name}") for name in ("lerp_", "maximum", "mul_")
)

OWN: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "weighted sum": lambda average, current, number: 0.75 * average + 0.25 * current,
    "towards": lambda average, current, number: average + (current - average) / (number + 1),
    "from": lambda average, current, number: current - (current - average) * 0.5,
    "lerp": lambda average, current, number: torch.lerp(average, current, 0.25),
    "negated": lambda average, current, number: -(-average * 0.5) + current / 2,
}

AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    **{name: {"avg_fn": function} for name, function in OWN.items()},
}


@each_kind
@pytest.mark.parametrize("average", AVERAGES)
def test_an_averaged_model_is_that_over_an_embedding(kind: Kind, average: str, pair: Pair) -> None:
    ours: Any = AveragedModel(pair.model, **AVERAGES[average])
    rivals: Any = AveragedModel(nn.ModuleList([pair.rival, pair.rival_top]), **AVERAGES[average])
    with torch.no_grad():
        pair.rival_top.load_state_dict(pair.top.state_dict())
        rivals.module[1].load_state_dict(pair.top.state_dict())
    for factor in (1.0, -0.5, 3.0, 0.25):
        pair.rival.zero_grad()
        pair.backward(factor)
        pair.step()
        ours.update_parameters(pair.model)
        rivals.update_parameters(nn.ModuleList([pair.rival, pair.rival_top]))
        [table] = ours.module[0].tables()
        rows = torch.ops.recstore.emb_read.table(table.handle, torch.arange(NUM), DIM)
        torch.testing.assert_close(rows, rivals.module[0].weight.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.module[1].weight, rivals.module[1].weight)
        pair.assert_equal_rows()
    assert not torch.equal(rows, pair.rows())


def many_ids(count: int, seed: int) -> Tensor:
    return torch.randint(0, 150_000, (count,), generator=torch.Generator().manual_seed(seed))


def test_rows_that_only_one_side_has_count_with_their_initial_value(table_name: Callable[[], str]) -> None:
    count = 150_000
    module = DistEmbedding(None, 4, table_name(), optimizer={"kind": "sgd", "lr": 1.0}, initializer={"kind": "normal"})
    initial = module.weight[torch.arange(count)]
    ours: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    rival = nn.Embedding(count, 4, _weight=initial.clone())
    rivals: Any = AveragedModel(rival, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ours.update_parameters(module)
    rivals.update_parameters(rival)
    ours.module.weight[[count + 1]] = torch.ones(1, 4)
    optimizer = SparseOptimizer(modules=[module])
    for seed in range(3):
        for each, steps in ((module, [optimizer]), (rival, [torch.optim.SGD(rival.parameters(), 1.0)])):
            each.zero_grad()
            each(many_ids(60_000, seed)).square().sum().backward()
            [step.step() for step in steps]
        ours.update_parameters(module)
        rivals.update_parameters(rival)
    rows = ours.module.weight[torch.arange(count)]
    torch.testing.assert_close(rows, rivals.module.weight.detach(), rtol=1e-6, atol=1e-6)
    lone = 1.0 * 0.9**3 + module.weight[[count + 1]] * (1 - 0.9**3)
    torch.testing.assert_close(ours.module.weight[[count + 1]], lone, rtol=1e-6, atol=1e-6)


def test_a_table_that_two_modules_share_is_averaged_once(table_name: Callable[[], str]) -> None:
    name = table_name()
    model: Any = nn.ModuleList([DistEmbedding(NUM, DIM, name, initializer="zeros") for _ in range(2)])
    for average in (AVERAGES["ema"], AVERAGES["ema one by one"]):
        averaged: Any = AveragedModel(model, **average)
        averaged.update_parameters(model)
        model[0].weight[[1]] = torch.ones(1, DIM)
        averaged.update_parameters(model)
        torch.testing.assert_close(averaged.module[1].weight[[1]], torch.full((1, DIM), 0.1))
        model[0].weight[[1]] = torch.zeros(1, DIM)


def test_rows_of_16_bits_are_averaged_in_float32_and_rounded(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    averaged: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    averaged.update_parameters(module)
    before = averaged.module.weight[[1]]
    module.weight[[1]] = torch.ones(1, DIM)
    averaged.update_parameters(module)
    expected = torch.lerp(before, torch.ones(1, DIM), 0.25).to(torch.bfloat16).to(torch.float32)
    assert torch.equal(averaged.module.weight[[1]], expected)


def test_batch_norms_of_an_averaged_model_are_updated(table_name: Callable[[], str]) -> None:
    model: Any = nn.Sequential(DistEmbedding(NUM, DIM, table_name()), nn.BatchNorm1d(DIM))
    averaged: Any = AveragedModel(model)
    averaged.update_parameters(model)
    update_bn([torch.arange(NUM), torch.arange(3)], averaged)
    assert averaged.module[1].num_batches_tracked == 2


SOFT: dict[str, Callable[[Any, Any], Any]] = {
    "copy_ of data": lambda target, source: target.data.copy_(0.25 * source.data + 0.75 * target.data),
    "copy_ of detached": lambda target, source: target.detach().copy_(source.detach() * 0.25 + target.detach() * 0.75),
    "copy_ to the parameter": lambda target, source: target.copy_(0.25 * source.data + 0.75 * target.data),
    "lerp_ of data": lambda target, source: target.data.lerp_(source.data, 0.25),
    "lerp_": lambda target, source: target.lerp_(source, 0.25),
    "add_": lambda target, source: target.data.add_(source.data - target.data, alpha=0.25),
    "sub_": lambda target, source: target.data.sub_(0.25 * (target.data - source.data)),
    "foreach": lambda target, source: foreach_lerp_([target.data], [source.data], 0.25),
}


@pytest.mark.parametrize("way", SOFT)
def test_a_target_network_moves_towards_its_model(way: str, table_name: Callable[[], str]) -> None:
    model: Any = nn.Sequential(DistEmbedding(NUM, DIM, table_name(), initializer="zeros"), nn.Linear(DIM, 1))
    target: Any = copy.deepcopy(model)
    model[0].weight[[1]] = torch.ones(1, DIM)
    with torch.no_grad():
        model[1].weight += 1
        before = target[1].weight.clone()
        for own, source in zip(target.parameters(), model.parameters(), strict=True):
            SOFT[way](own, source)
    assert target[0].weight[[1]].tolist() == [[0.25] * DIM]
    assert model[0].weight[[1]].tolist() == [[1.0] * DIM]
    torch.testing.assert_close(target[1].weight, before + 0.25)


@pytest.mark.parametrize(
    "copied", [lambda own, source: own.copy_(source), lambda own, source: own.data.copy_(source.data)]
)
def test_a_target_network_takes_its_models_rows(
    copied: Callable[[Any, Any], Any], table_name: Callable[[], str]
) -> None:
    module = DistEmbedding(None, DIM, table_name())
    target: Any = copy.deepcopy(module)
    module.weight[[1]] = torch.ones(1, DIM)
    target.weight[[2]] = torch.ones(1, DIM)
    with torch.no_grad():
        for own, source in zip(target.parameters(), module.parameters(), strict=True):
            copied(own, source)
    ids = torch.arange(4)
    assert torch.equal(target.weight[ids], module.weight[ids])


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "mul_": lambda target, source: target.data.mul_(0.75),
    "add_": lambda target, source: target.data.add_(source.data),
    "mul": lambda target, source: target.data * source.data,
    "pow_": lambda target, source: target.data.pow_(source.data),
    "_foreach_max": lambda target, source: foreach_maximum([target.data], [source.data]),
    "_foreach_mul_": lambda target, source: foreach_mul_([target.data], 0.5),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_average_of_rows_is_refused(what: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    module = DistEmbedding(NUM, DIM, name)
    copied = copy.deepcopy(module)
    [target], [source] = copied.parameters(), module.parameters()
    with pytest.raises(RuntimeError) as caught:
        REFUSED[what](target, source)
    assert f'the parameter of DistEmbedding over table "{name}' in str(caught.value)
    assert "rows are averaged by copy_ of a sum of parameters whose shares add up to one" in str(caught.value)


def test_a_clone_on_the_tape_of_autograd_is_refused(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name())
    [parameter] = module.parameters()
    with pytest.raises(AttributeError, match=r'over table .* has no "clone": weight'):
        parameter.clone()


def test_a_sum_of_rows_that_have_changed_since_is_refused(table_name: Callable[[], str]) -> None:
    ours, average = (DistEmbedding(NUM, DIM, table_name()) for _ in range(2))
    [p], [q] = ours.parameters(), average.parameters()
    for change in (lambda: ours.weight.__setitem__(0, torch.ones(DIM)), ours.reset_parameters):
        ours.weight[1] = torch.ones(DIM)
        mean = p.data * 0.5 + q.data * 0.5
        change()
        with pytest.raises(RuntimeError, match=r"rows have changed since this sum was made.*clone\(\) keeps"):
            q.data.copy_(mean)
    assert len(average.table) == 0


def test_an_average_that_is_none_is_refused_by_averaged_model(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name())
    averaged: Any = AveragedModel(module, avg_fn=lambda average, current, number: torch.maximum(average, current))
    averaged.update_parameters(module)
    with pytest.raises(RuntimeError, match='has no "maximum": rows are averaged by'):
        averaged.update_parameters(module)


def test_a_detached_stand_in_says_the_size_of_the_table_and_no_value(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name())
    [parameter] = module.parameters()
    detached = parameter.detach()
    assert (detached.shape, detached.numel(), len(detached), detached.dim()) == ((NUM, DIM), NUM * DIM, NUM, 2)
    for asked in (float, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.sum):
        with pytest.raises(RuntimeError, match=r'over table .* has no "\w+": rows are averaged by'):
            asked(detached)
