"""The states of `SparseOptimizer`: which are refused, by table and value, and that nothing changes then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_kinds import KINDS
from test_state_dict import ADAM, DIM, IDS, assert_equal, rows_of, through_a_file

from recstore_ops import DistEmbedding, SparseOptimizer, _native, get_kv_client
from recstore_ops.state import native_state

pytestmark = pytest.mark.tier("test")


def replaced(state: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*state[:place], value, *state[place + 1 :])


RULE = {"kind": "adam", "betas": [0.9, 0.999], "eps": 1e-8, "bias_correction": "table"}
PROGRESS = {"step": 1, "learning_rate": 0.1, "learning_rate_was_set": False, "group_lr": 0.1, "optimizer": RULE}
SLOT = torch.zeros(2, DIM)
BAD_OPTIMIZER_STATES: list[tuple[int, Any, type[Exception], str]] = [
    (0, IDS.int(), TypeError, r"ids of torch.int64, got torch.int32"),
    (0, torch.tensor([1, 1]), ValueError, r"has the id 1 more than once"),
    (
        0,
        torch.tensor([1, 3]),
        ValueError,
        r"of 2 ids, which are not those of the 2 rows .* load the state of the model",
    ),
    (0, [1, 2], TypeError, r"takes the state of an optimizer as \(ids, slots, progress\), got a tuple of 3"),
    (1, None, TypeError, r"takes the state of an optimizer as \(ids, slots, progress\), got a tuple of 3"),
    (1, {"sum": SLOT}, ValueError, r"has the slots \['exp_avg', 'exp_avg_sq'\], got the state of \['sum'\]"),
    (1, {"exp_avg": SLOT, "exp_avg_sq": 1}, TypeError, r'slot "exp_avg_sq" .* is a float32 tensor, got a int'),
    (1, {"exp_avg": SLOT.half(), "exp_avg_sq": SLOT}, TypeError, r"is a float32 tensor, got a tensor of torch.float16"),
    (1, {"exp_avg": SLOT[:1], "exp_avg_sq": SLOT}, ValueError, r"has the shape \(2, 2\), got \(1, 2\)"),
    (
        1,
        {"exp_avg": SLOT, "exp_avg_sq": SLOT - torch.tensor([[0.0, 0.0], [0.0, 0.5]])},
        ValueError,
        r'slot "exp_avg_sq" .* must be finite and not negative, got -0.5 for the id 2$',
    ),
    (
        1,
        {"exp_avg": SLOT + torch.tensor([torch.inf, 0.0]), "exp_avg_sq": SLOT},
        ValueError,
        r'slot "exp_avg" .* must be finite, got inf for the id 1$',
    ),
    (2, {**PROGRESS, "optimizer": "adam"}, TypeError, r"the optimizer in the state .* must be a dict, got a str"),
    (
        2,
        {**PROGRESS, "optimizer": {**RULE, "betas": [0.5, 0.5]}},
        ValueError,
        r"of the optimizer adam with betas=\[0.5, 0.5\], table .* has adam with betas=\[0.9, 0.999\]: open the table",
    ),
    (2, {key: PROGRESS[key] for key in PROGRESS if key != "optimizer"}, ValueError, r"must have .* beside its slots"),
    (2, {"step": 1}, ValueError, r"must have \['group_lr', .* beside its slots, got \['step'\]"),
    (2, {**PROGRESS, "step": -1}, ValueError, r"the step of table .* must be an int from 0 on, got -1"),
    (2, {**PROGRESS, "step": 1.0}, ValueError, r"the step of table .* must be an int from 0 on, got 1.0"),
    (2, {**PROGRESS, "learning_rate_was_set": 1}, ValueError, r"must be a bool, got 1"),
    (2, {**PROGRESS, "learning_rate": "1"}, ValueError, r"learning_rate of table .* must be a number, got '1'"),
    (2, {**PROGRESS, "group_lr": -1.0}, ValueError, r"must be finite and not negative, got -1.0"),
]


@pytest.mark.parametrize(("place", "value", "error", "message"), BAD_OPTIMIZER_STATES)
def test_an_invalid_state_of_an_optimizer_is_refused_and_changes_nothing(
    place: int, value: Any, error: type[Exception], message: str, table_name: Callable[[], str]
) -> None:
    modules = [DistEmbedding(None, DIM, table_name(), optimizer=ADAM) for _ in range(2)]
    optimizer = SparseOptimizer(modules=modules)
    modules[1].weight[IDS] = rows_of()
    before = optimizer.state_dict()
    states = through_a_file(before)
    states["state"][modules[0].name][2]["step"] = 3
    states["param_groups"][0]["lr"] = 7.0
    states["state"][modules[1].name] = replaced(states["state"][modules[1].name], place, value)
    with pytest.raises(error, match=message) as raised:
        optimizer.load_state_dict(states)
    assert modules[1].name in str(raised.value)
    assert_equal(optimizer.state_dict(), before)


def stepped(name: str, **options: Any) -> tuple[DistEmbedding, SparseOptimizer]:
    """A module and its optimizer after a step."""
    module = DistEmbedding(None, DIM, name, initializer="zeros", **options)
    optimizer = SparseOptimizer(modules=[module])
    module(IDS).sum().backward()
    optimizer.step()
    return module, optimizer


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}, {"momentum": 0.5, "catch_up": True}],
    "adagrad": [{"eps": 0.5}, {"lr_decay": 0.5}, {"convention": "torch"}],
    "rmsprop": [{"alpha": 0.5}, {"momentum": 0.5}, {"centered": True}],
    "adadelta": [{"rho": 0.5}],
    "adam": [{"betas": [0.5, 0.5]}, {"amsgrad": True}, {"bias_correction": "row"}],
    "ftrl": [{"beta": 0.5}, {"l1": 0.5}, {"l2": 0.5}],
}
"""For each kind options of which each keeps another state, or steps otherwise from the same one."""
RULES = [{"kind": kind, **options} for kind in KINDS for options in ({}, *OPTIONS.get(kind, []))]


def test_the_state_of_each_rule_is_taken_by_that_rule_alone(table_name: Callable[[], str]) -> None:
    states: list[Any] = []
    for saved in RULES:
        module, optimizer = stepped(table_name(), optimizer=saved)
        states.append(optimizer.state_dict()["state"][module.name])
    for place, own in enumerate(RULES):
        module, optimizer = stepped(table_name(), optimizer=own)
        before = optimizer.state_dict()
        for other, state in enumerate(states):
            given = {**before, "state": {module.name: state}}
            if other == place:
                optimizer.load_state_dict(given)
            else:
                words = f'the state is of the optimizer {RULES[other]["kind"]}.*, table ".*" has {own["kind"]}'
                with pytest.raises(ValueError, match=words):
                    optimizer.load_state_dict(given)
        assert_equal(optimizer.state_dict(), before)


def test_a_state_is_taken_with_another_learning_rate_and_weight_decay(table_name: Callable[[], str]) -> None:
    module, optimizer = stepped(table_name(), optimizer={"kind": "adamw", "lr": 0.1, "weight_decay": 0.1})
    state = copy.deepcopy(optimizer.state_dict())
    get_kv_client().drop(module.name)
    module, optimizer = stepped(module.name, optimizer={"kind": "adamw", "lr": 0.5, "weight_decay": 0.5})
    optimizer.load_state_dict(state)
    assert_equal(optimizer.state_dict(), state)


@pytest.mark.parametrize("policy", ["skip", "allow"])
def test_slots_of_a_table_that_takes_infinity_may_hold_it(policy: str, table_name: Callable[[], str]) -> None:
    module, optimizer = stepped(table_name(), optimizer=ADAM, nan_policy=policy)
    state = optimizer.state_dict()
    state["state"][module.name][1]["exp_avg_sq"][0, 0] = torch.inf
    optimizer.load_state_dict(state)
    assert_equal(optimizer.state_dict(), state)


def test_the_state_of_other_tables_is_refused(table_name: Callable[[], str]) -> None:
    module, other = (DistEmbedding(None, DIM, table_name()) for _ in range(2))
    optimizer = SparseOptimizer(modules=[module])
    state, others = optimizer.state_dict(), SparseOptimizer(modules=[other]).state_dict()
    both = SparseOptimizer(modules=[module, other]).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups, 2 instead of 1"):
        optimizer.load_state_dict(both)
    with pytest.raises(ValueError, match="has parameter groups of the tables"):
        optimizer.load_state_dict(others)
    with pytest.raises(ValueError, match="this optimizer one of each of"):
        optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "params": []}]})
    with pytest.raises(ValueError, match=r"the state is of the tables .*, this optimizer steps"):
        optimizer.load_state_dict({**state, "state": others["state"]})
    get_kv_client().drop(module.name)
    shared = SparseOptimizer().state_dict()
    with pytest.raises(ValueError, match=r"tables that are not there, .* make the model first"):
        SparseOptimizer().load_state_dict({**shared, "state": state["state"]})


def test_the_store_checks_a_state_by_itself(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name())
    state = native_state(module.table, SparseOptimizer(modules=[module]).state_dict()["state"][module.name])
    for bad, error, message in [
        ({**state, "ids": bytes(8)}, RuntimeError, "expected the ids of its 0 rows, got 1"),
        ({**state, "ids": bytes(7)}, ValueError, "7 bytes are no numbers of 8"),
        ({**state, "slots": [bytes(4)]}, RuntimeError, "expected 0 slots, got 1"),
    ]:
        with pytest.raises(error, match=message):
            _native.put_optimizer_states([bad])
    _native.put_optimizer_states([state])
