"""Learning rate schedules of a training run."""

from __future__ import annotations

import math

import pytest
import torch

from recstore_ops.training.run.schedules import Schedule

pytestmark = pytest.mark.tier("quick")


def optimizer_of(lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr)


def test_constant_leaves_the_rates_alone() -> None:
    optimizer = optimizer_of(0.3)
    Schedule([optimizer], "constant", epochs=2).before_step(1, 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_every_optimizer_keeps_its_own_rate() -> None:
    optimizers = [optimizer_of(0.3), optimizer_of(0.01)]
    Schedule(optimizers, "linear", epochs=2).before_step(7, 0.5)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == pytest.approx([0.225, 0.0075])


@pytest.mark.parametrize(
    ("name", "gamma", "expected"),
    [
        ("linear", None, [1.0, 0.75, 0.5, 0.0]),
        ("cosine", None, [1.0, 0.5 * (1 + math.sqrt(0.5)), 0.5, 0.0]),
        ("exponential", 0.5, [1.0, 1.0, 0.5, 0.25]),
    ],
)
def test_factors_over_a_run_of_two_epochs(name, gamma: float | None, expected: list[float]) -> None:
    schedule = Schedule([], name, epochs=2, gamma=gamma)
    assert [schedule.factor(100, done) for done in (0.0, 0.5, 1.0, 2.0)] == pytest.approx(expected)


def test_the_rate_never_becomes_zero() -> None:
    optimizer = optimizer_of(1.0)
    Schedule([optimizer], "linear", epochs=1).before_step(100, 1.0)
    assert optimizer.param_groups[0]["lr"] == 1e-6


def test_rows_beyond_the_estimate_do_not_turn_cosine_around() -> None:
    assert Schedule([], "cosine", epochs=1).factor(1, 1.5) == pytest.approx(0.0)


def test_warmup_rises_in_equal_parts() -> None:
    schedule = Schedule([], "constant", epochs=1, warmup_steps=4)
    assert [schedule.factor(step, 0.0) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_plateau_falls_where_the_logloss_does_not() -> None:
    schedule = Schedule([], "plateau", epochs=9, gamma=0.5)
    factors = []
    for logloss in (0.6, 0.5, 0.5, 0.4, 0.41):
        schedule.after_evaluation(logloss)
        factors.append(schedule.factor(1, 0.0))
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_other_schedules_do_not_look_at_the_logloss() -> None:
    schedule = Schedule([], "exponential", epochs=9, gamma=0.5)
    schedule.after_evaluation(0.5)
    schedule.after_evaluation(0.6)
    assert schedule.factor(1, 0.0) == 1.0
