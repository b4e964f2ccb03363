"""Studies of optuna whose trials make models over tables, beside the same ones over `nn.Embedding`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import optuna
import pytest
import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding, SparseOptimizer

optuna.logging.set_verbosity(optuna.logging.ERROR)

NUM, TRIALS = 20, 9

Named = Callable[[optuna.Trial], dict[str, Any]]


def by_number(trial: optuna.Trial) -> dict[str, Any]:
    """A name for each trial."""
    return {"name": f"trial{trial.number}/user"}


def anew(trial: optuna.Trial) -> dict[str, Any]:
    """One name, whose table begins anew in each trial."""
    return {"name": "user", "on_existing": "reset"}


def batches() -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(7)
    return [
        (torch.randint(NUM, (16,), generator=draws), torch.randint(2, (16,), generator=draws).float()) for _ in range(6)
    ]


def model_of(trial: optuna.Trial, named: Named | None, lr: float, dim: int) -> tuple[nn.Module, list[Any]]:
    """A model with values of its trial, and its optimizers."""
    draws = torch.Generator().manual_seed(trial.number)
    matrix, weight = torch.randn(NUM, dim, generator=draws), torch.randn(1, dim, generator=draws)
    head = nn.Linear(dim, 1, bias=False)
    head.weight.data.copy_(weight)
    if named is None:
        model = nn.Sequential(nn.Embedding.from_pretrained(matrix, freeze=False), head)
        return model, [torch.optim.SGD(model.parameters(), lr=lr)]
    options: Any = {"optimizer": {"kind": "sgd", "lr": lr}, "init_func": lambda shape, dtype: matrix}
    model = nn.Sequential(DistEmbedding(NUM, dim, **named(trial), **options), head)
    return model, [torch.optim.SGD(model.parameters(), lr=lr), SparseOptimizer(modules=[model])]


def objective_of(named: Named | None, between: Callable[[], Any] = lambda: None) -> Callable[[optuna.Trial], float]:
    """The objective of a study over tables that `named` names, or over embeddings."""

    def objective(trial: optuna.Trial) -> float:
        lr, dim = trial.suggest_float("lr", 0.01, 1.0, log=True), trial.suggest_int("dim", 2, 6)
        model, optimizers = model_of(trial, named, lr, dim)
        loss = torch.zeros(())
        for step, (ids, labels) in enumerate(batches()):
            between()
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids).squeeze(1), labels)
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            for each in optimizers:
                each.step()
            trial.report(loss.item(), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss.item()

    return objective


def trials(objective: Callable[[optuna.Trial], float], n_jobs: int, prunes: bool = True) -> dict[int, tuple[Any, ...]]:
    """What each trial had and gave."""
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2) if prunes else optuna.pruners.NopPruner()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=TRIALS, n_jobs=n_jobs)
    return {each.number: (each.params, each.value, each.state) for each in study.trials}


@pytest.mark.parametrize("named", [by_number, anew])
def test_trials_one_after_another_are_those_over_embeddings(named: Named) -> None:
    found, expected = trials(objective_of(named), 1), trials(objective_of(None), 1)
    assert any(state is optuna.trial.TrialState.PRUNED for _, _, state in expected.values())
    for number, (params, value, state) in expected.items():
        assert found[number] == (params, pytest.approx(value, abs=1e-5), state)


def test_trials_beside_each_other_are_those_over_embeddings() -> None:
    found = trials(objective_of(by_number), 2, prunes=False)
    assert len(found) == TRIALS
    objective = objective_of(None)
    for number, (params, value, _) in found.items():
        # Two threads draw in any order, so the embedding is given what the trial over a table drew.
        fixed = optuna.trial.FixedTrial(params, number=number)
        assert objective(fixed) == pytest.approx(value, abs=1e-5)  # type: ignore[arg-type]


def test_trials_beside_each_other_are_refused_one_table() -> None:
    together = threading.Barrier(2)

    def wait() -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait(timeout=60)

    trained = objective_of(anew, wait)

    def objective(trial: optuna.Trial) -> float:
        try:
            return trained(trial)
        finally:
            together.abort()  # The other one goes on alone.

    with pytest.raises((RuntimeError, ValueError), match='table "user"'):
        trials(objective, 2, prunes=False)
