"""Rules written in Python: what they are given, what they keep, and what becomes of their mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from own_draws import fresh_name

from recstore_ops import (
    DistEmbedding,
    HashTable,
    RecStoreClient,
    SparseOptimizer,
    UpdateRule,
    checkpoint,
    register_rule,
    table_names,
)

pytestmark = [pytest.mark.tier("test"), pytest.mark.embedded_only("the rules of servers are those of their program")]

TableName = Callable[[], str]
Floats = NDArray[np.float32]
DIM = 3


class Momentum(UpdateRule):
    """The store's `sgd` with a momentum of 0.5."""

    def slots(self, dim: int) -> dict[str, int]:
        return {"momentum_buffer": dim}

    def apply(self, row_D: Floats, slots: dict[str, Floats], gradient_D: Floats, step: int, lr: float) -> Floats:
        slots["momentum_buffer"] = np.float32(0.5) * slots["momentum_buffer"] + gradient_D
        return row_D - np.float32(lr) * slots["momentum_buffer"]


class Plain(UpdateRule):
    """SGD that counts: steps of the table, and of the row."""

    def slots(self, dim: int) -> dict[str, int]:
        return {"steps": 1, "adopted": 2}

    def apply(self, row_D: Floats, slots: dict[str, Floats], gradient_D: Floats, step: int, lr: float) -> Floats:
        slots["steps"][:] = step
        return row_D - np.float32(lr) * gradient_D

    def adopt(self, row_D: Floats, slots: dict[str, Floats], lr: float) -> None:
        slots["adopted"][:] = [row_D.sum(), slots["adopted"][1] + 1]


def registered(rule: UpdateRule) -> dict[str, Any]:
    """Registers a rule under a name of its own, and returns the optimizer that names it."""
    name = fresh_name()
    told = re.escape(f'the update rule "{name}" is a call of Python for each row: slow')
    with pytest.warns(RuntimeWarning, match=told):
        register_rule(name, rule)
    return {"kind": "rule", "name": name, "lr": 0.1}


def train(module: DistEmbedding | HashTable, steps: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    optimizer = SparseOptimizer(modules=[module])
    for _ in range(steps):
        (module(torch.randint(20, (60,), generator=generator)) ** 2).sum().backward()
        optimizer.step()
    return module(torch.arange(20)).detach()


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_a_rule_trains_as_the_stores_own(table_name: TableName) -> None:
    own = DistEmbedding(None, DIM, table_name(), optimizer=registered(Momentum()), initializer="zeros")
    theirs = DistEmbedding(
        None, DIM, table_name(), optimizer={"kind": "sgd", "lr": 0.1, "momentum": 0.5}, initializer="zeros"
    )
    for module in (own, theirs):
        RecStoreClient().push(module.name, torch.arange(20), torch.linspace(-1, 1, 20 * DIM).view(20, DIM))
    torch.testing.assert_close(train(own), train(theirs), rtol=0, atol=1e-6)


def test_a_rule_sees_the_steps_of_the_table_and_keeps_its_slots(table_name: TableName) -> None:
    table = HashTable(DIM, table_name(), optimizer=registered(Plain()), initializer="zeros")
    assert table.slot_names() == ["embedding", "steps", "adopted"]
    optimizer = SparseOptimizer(modules=[table])
    for ids in ([4], [4, 9, 4], [9]):
        table(torch.tensor(ids).unsqueeze(1)).sum().backward()
        optimizer.step()
    ids = torch.tensor([[4], [9]])
    assert table.slot("steps", ids).flatten().tolist() == [2, 3]
    torch.testing.assert_close(table.slot("embedding", ids).flatten(0, 1)[:, 0], torch.tensor([-0.3, -0.2]))
    assert table.slot("adopted", ids).reshape(2, 2).tolist() == [[0, 1], [0, 1]]
    RecStoreClient().push(table.name, torch.tensor([9]), torch.ones(1, DIM))
    assert table.slot("adopted", ids[1:]).flatten().tolist() == [DIM, 2]


def test_slots_lie_in_checkpoints_under_their_names(table_name: TableName, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": registered(Momentum()), "initializer": "zeros"}
    name = table_name()
    module = DistEmbedding(None, DIM, name, **options)
    train(module, 2)
    checkpoint.save(tmp_path)
    expected = train(module, 2)
    checkpoint.load(tmp_path, tables=[name])
    assert torch.equal(train(module, 2), expected)


class Wrong(UpdateRule):
    """Returns, or leaves in its slots, what it was made with."""

    def __init__(self, returned: Any = None, kept: dict[str, Any] | None = None) -> None:
        self.returned, self.kept = returned, kept

    def slots(self, dim: int) -> dict[str, int]:
        return {"s": 2}

    def apply(self, row_D: Floats, slots: dict[str, Floats], gradient_D: Floats, step: int, lr: float) -> Any:
        if isinstance(self.returned, Exception):
            raise self.returned
        if self.kept is not None:
            slots.clear()
            slots.update(self.kept)
        return self.returned


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Wrong(None), "TypeError: apply returned NoneType; expected an array of floats"),
        (Wrong(np.zeros(2, np.float32)), r"ValueError: apply returned of shape \[2\]; expected \[3\]"),
        (Wrong(np.zeros(3, complex)), "TypeError: apply returned an array of complex128; expected an array of floats"),
        (Wrong(ZeroDivisionError("by nothing")), "ZeroDivisionError: by nothing"),
        (Wrong(np.zeros(3), {"t": np.zeros(2)}), "ValueError: expected the slots s, got t"),
        (Wrong(np.zeros(3), {}), "ValueError: expected the slots s, got none"),
        (Wrong(np.zeros(3), {"s": np.zeros(3)}), r"ValueError: slot s is of shape \[3\]; expected \[2\]"),
        (Wrong(np.zeros(3), {"s": 1.0}), "TypeError: slot s is float; expected an array of floats"),
    ],
)
def test_a_mistake_of_a_rule_is_the_error_of_the_step(
    rule: Wrong, message: str, table_name: TableName, capfd: pytest.CaptureFixture[str]
) -> None:
    module = DistEmbedding(None, DIM, table_name(), optimizer=registered(rule))
    module(torch.tensor([5])).sum().backward()
    with pytest.raises(RuntimeError, match=message) as caught:
        SparseOptimizer(modules=[module]).step()
    assert f'"{module.name}"' in str(caught.value)
    assert capfd.readouterr().err == "", "an exception is no panic that anyone sees"
    with pytest.raises(RuntimeError, match=message):
        module(torch.tensor([5]))
    RecStoreClient().drop(module.name)


class WithoutSlots(UpdateRule):
    def slots(self, dim: int) -> dict[str, int]:
        raise LookupError(f"no slots for {dim}")

    def apply(self, row_D: Floats, slots: dict[str, Floats], gradient_D: Floats, step: int, lr: float) -> Floats:
        return row_D


def test_a_mistake_in_the_slots_opens_no_table(table_name: TableName) -> None:
    name = table_name()
    with pytest.raises(ValueError, match=f"LookupError: no slots for {DIM}"):
        DistEmbedding(None, DIM, name, optimizer=registered(WithoutSlots()))
    assert name not in table_names()


def test_a_wrong_registration_is_refused() -> None:
    taken = registered(Momentum())["name"]
    with pytest.raises(ValueError, match=f'an update rule "{taken}" is registered already'):
        register_rule(taken, Momentum())
    with pytest.raises(ValueError, match="the name of an update rule must not be empty"):
        register_rule("", Momentum())
    with pytest.raises(TypeError, match="expected an UpdateRule, got ABCMeta"):
        register_rule("class", Momentum)  # type: ignore[arg-type]


def test_a_rule_that_nobody_registered_is_named(table_name: TableName) -> None:
    with pytest.raises((RuntimeError, ValueError), match="nobody's"):
        DistEmbedding(None, DIM, table_name(), optimizer={"kind": "rule", "name": "nobody's", "lr": 0.1})


class OfSlots(Plain):
    """A rule whose `slots` returns what it was made with."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def slots(self, dim: int) -> dict[str, int]:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ([("steps", 1)], TypeError),
        (None, TypeError),
        ("steps", TypeError),
        ({"steps": "1"}, TypeError),
        ({"steps": 1.5}, TypeError),
        ({"steps": None}, TypeError),
        ({1: 2}, TypeError),
        ({"steps": -1}, ValueError),
        ({"steps": 0}, ValueError),
        ({"": 1}, ValueError),
    ],
)
def test_slots_that_are_none_are_refused_as_the_rule_is_registered(returned: Any, error: type[Exception]) -> None:
    name = fresh_name()
    with pytest.raises(error, match=r"^OfSlots\.slots\(64\) returned .*; expected a"):
        register_rule(name, OfSlots(returned))
    with pytest.warns(RuntimeWarning):  # The name is free.
        register_rule(name, OfSlots({"steps": np.int64(1), "adopted": 2}))
