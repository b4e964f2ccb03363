"""Means of states, as programs make "soups" of models: ids that they change are found, and others load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import DIM, OPTIONS
from torch import Tensor, nn

from recstore_ops import DistEmbedding, RecStoreEmbeddingBagCollection
from recstore_ops.state.ids_check import are_ids_as_saved, check_of_ids

pytestmark = pytest.mark.tier("test")

State = dict[str, Tensor]
LARGE = torch.tensor([3, 2**24 + 1, 2**24 + 3, 2**40 + 5])
SMALL = torch.tensor([0, 1, 7, 60])
EXACT = torch.tensor([-(2**50) - 1, 3, 2**50 + 1])

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def by_sum(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = values[0].to(dtype)
    for value in values[1:]:
        total = total + value.to(dtype)
    return (total / len(values)).to(values[0].dtype)


def by_stack(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack([value.to(dtype) for value in values]).mean(0).to(values[0].dtype)


def by_running_mean(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    mean = values[0].to(dtype)
    for count, value in enumerate(values[1:], 2):
        mean = mean + (value.to(dtype) - mean) / count
    return mean.to(values[0].dtype)


def alone(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    return values[0].to(dtype).to(values[0].dtype)


WAYS = {"sum": by_sum, "stack": by_stack, "running mean": by_running_mean, "no mean": alone}
each_way = pytest.mark.parametrize("way", WAYS)


def models(ids: Tensor, table_name: Callable[[], str], count: int) -> list[Any]:
    made: list[Any] = [nn.Sequential(DistEmbedding(None, DIM, table_name(), **OPTIONS)) for _ in range(count)]
    for number, model in enumerate(made):
        model[0].weight[ids] = torch.full((len(ids), DIM), 2.0**number)
    return made


def soup(states: list[State], way: str, dtype: torch.dtype) -> State:
    return {key: WAYS[way]([state[key] for state in states], dtype) for key in states[0]}


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_mean_of_states_with_equal_small_ids_is_loaded(
    way: str, dtype: torch.dtype, count: int, table_name: Callable[[], str]
) -> None:
    cooked = models(SMALL, table_name, count)
    states = [model.state_dict() for model in cooked]
    mixed = soup(states, way, dtype)
    cooked[0].load_state_dict(mixed)
    assert torch.equal(cooked[0].state_dict()["0.ids"], SMALL)
    assert torch.equal(cooked[0].state_dict()["0.rows"], mixed["0.rows"])


@each_way
def test_a_mean_by_doubles_keeps_ids_below_two_to_the_53(way: str, table_name: Callable[[], str]) -> None:
    cooked = models(EXACT, table_name, 2)
    cooked[0].load_state_dict(soup([model.state_dict() for model in cooked], way, torch.float64))
    assert torch.equal(cooked[0].state_dict()["0.ids"], EXACT)


@pytest.mark.parametrize("ids", [SMALL, LARGE], ids=["small", "large"])
def test_a_mean_that_stays_in_floats_loads_if_its_ids_are_right(ids: Tensor, table_name: Callable[[], str]) -> None:
    one, other = models(ids, table_name, 2)
    states = one.state_dict(), other.state_dict()
    mean = {key: (states[0][key] + states[1][key]) / 2 for key in states[0]}
    assert mean["0.ids"].dtype == torch.float32
    if ids is LARGE:
        with pytest.raises(ValueError, match=r'"0.ids" has other ids than "0.ids_check".*Average the rows'):
            one.load_state_dict(mean)
        assert torch.equal(one[0].weight[ids], torch.full((len(ids), DIM), 1.0))
    else:
        one.load_state_dict(mean)
        assert torch.equal(one[0].weight[ids], torch.full((len(ids), DIM), 1.5))


@each_way
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_that_a_mean_changed_are_refused_and_nothing_changes(
    way: str, strict: bool, dtype: torch.dtype, table_name: Callable[[], str]
) -> None:
    cooked = models(LARGE[[0, 2, 3]], table_name, 2)
    target, state = cooked[0], cooked[0].state_dict()
    mixed = soup([model.state_dict() for model in cooked], way, dtype)
    assert not torch.equal(mixed["0.ids"], state["0.ids"])
    with pytest.raises(
        ValueError, match=r'table ".*": "0\.ids" has other ids than "0\.ids_check" was made of'
    ) as raised:
        target.load_state_dict(mixed, strict=strict)
    assert target[0].name in str(raised.value)
    assert all(torch.equal(value, state[key]) for key, value in target.state_dict().items())


def test_a_mean_of_states_of_other_ids_is_refused(table_name: Callable[[], str]) -> None:
    first, second = models(SMALL, table_name, 1) + models(SMALL + 2, table_name, 1)
    mixed = soup([first.state_dict(), second.state_dict()], "sum", torch.float64)
    with pytest.raises(ValueError, match="has other ids than"):
        first.load_state_dict(mixed)


def test_no_table_of_a_collection_takes_a_mean_that_changed_ids_of_one(table_name: Callable[[], str]) -> None:
    names = [table_name(), table_name()]
    tables = [{"name": name, "num_embeddings": None, "embedding_dim": DIM, "feature_names": [name]} for name in names]
    bags = RecStoreEmbeddingBagCollection(tables, **OPTIONS)
    bags.embedding_bags[names[0]].weight[SMALL] = torch.ones(4, DIM)
    bags.embedding_bags[names[1]].weight[LARGE[2:]] = torch.ones(2, DIM)
    state = bags.state_dict()
    mixed = soup([state, {key: value.clone() for key, value in state.items()}], "sum", torch.float32)
    mixed["_modules_of_tables.0.rows"] += 1.0
    with pytest.raises(ValueError, match=rf'table "{names[1]}": "_modules_of_tables\.1\.ids" has other ids than'):
        bags.load_state_dict(mixed)
    assert all(torch.equal(value, state[key]) for key, value in bags.state_dict().items())


def test_the_rows_of_a_mean_with_the_ids_of_one_state_are_loaded(table_name: Callable[[], str]) -> None:
    cooked = models(LARGE, table_name, 3)
    states = [model.state_dict() for model in cooked]
    mixed = soup(states, "sum", torch.float32)
    kept = {key: value if key.endswith("rows") else states[0][key] for key, value in mixed.items()}
    cooked[0].load_state_dict(kept)
    assert torch.equal(cooked[0][0].weight[LARGE], torch.full((4, DIM), 7 / 3))


@pytest.mark.parametrize("strict", [False, True])
def test_a_state_without_the_check_is_loaded(strict: bool, table_name: Callable[[], str]) -> None:
    source, target = models(LARGE, table_name, 2)
    state = {key: value for key, value in source.state_dict().items() if not key.endswith("ids_check")}
    found = target.load_state_dict(state, strict=strict)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert torch.equal(target.state_dict()["0.rows"], source.state_dict()["0.rows"])


def test_programs_that_choose_other_ids_are_taken_at_their_word(table_name: Callable[[], str]) -> None:
    source, target = models(LARGE, table_name, 2)
    state = dict(source.state_dict())
    parts = {key: state[key][:2] for key in ("0.ids", "0.rows")}
    turned = {key: state[key].flip(0) for key in ("0.ids", "0.rows")}
    for changed, expected in ((parts, LARGE[:2]), (turned, LARGE)):
        target.load_state_dict({**state, **changed})
        assert torch.equal(target.state_dict()["0.ids"], expected)
    # As many ids as before look like those of a mean, so the check is left out.
    renumbered = {**state, "0.ids": state["0.ids"] + 1}
    with pytest.raises(ValueError, match=r'changed on purpose, leave "0\.ids_check" out'):
        target.load_state_dict(renumbered)
    del renumbered["0.ids_check"]
    target.load_state_dict(renumbered)
    assert torch.equal(target.state_dict()["0.ids"], LARGE + 1)


def test_a_check_of_another_type_is_refused(table_name: Callable[[], str]) -> None:
    (model,) = models(SMALL, table_name, 1)
    state = {
        key: value.to(torch.uint8) if key.endswith("check") else value for key, value in model.state_dict().items()
    }
    with pytest.raises(TypeError, match=r'takes a tensor of torch.int64 as "0.ids_check", got torch.uint8'):
        model.load_state_dict(state)


@pytest.mark.parametrize("seed", range(20))
def test_any_change_of_the_ids_is_seen_and_order_is_not(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**62), 2**62, (50,), generator=generator)
    check = check_of_ids(ids)
    assert are_ids_as_saved(ids[torch.randperm(50, generator=generator)], check)
    assert not are_ids_as_saved(ids.float().to(torch.int64), check)
    for place in range(50):
        changed = ids.clone()
        changed[place] += 1 << seed
        assert not are_ids_as_saved(changed, check)
    swapped = ids.clone()
    swapped[0], swapped[1] = ids[0] + 1, ids[1] - 1  # The sum of ids is the same.
    assert not are_ids_as_saved(swapped, check)


def test_a_check_that_was_damaged_itself_takes_no_ids() -> None:
    check = check_of_ids(SMALL)
    for place in range(check.numel()):
        damaged = check.clone()
        damaged[place] = (damaged[place] + 16) % 256
        assert not are_ids_as_saved(SMALL, damaged)
    assert not are_ids_as_saved(SMALL, check[:5])
