"""Programs of Lightning over tables, beside the same ones over `nn.Embedding`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from clicks import LR, Outcome, assert_same, batches, dense_optimizer, made
from conftest import drop_tables
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, EMAWeightAveraging, StochasticWeightAveraging
from lightning_programs import Automatic, Ema, Manual, Thawing, outcome, trainer
from torch import nn


def averaging_from_the_second_epoch() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=LR, swa_epoch_start=1)


PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped by norm": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "EMA from the first step": {"callbacks": [Ema]},
    "EMA of Lightning": {"callbacks": [lambda: EMAWeightAveraging(decay=0.9, update_starting_at_step=3)]},
    "SWA": {"callbacks": [averaging_from_the_second_epoch], "epochs": 4},
    "finetuning": {"callbacks": [Thawing], "epochs": 3},
    "stopped early": {"callbacks": [lambda: EarlyStopping("validation", min_delta=1.0, patience=1)], "epochs": 5},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_automatic_optimization_trains_tables_as_embeddings(program: str) -> None:
    expected = outcome(Automatic, False, **PROGRAMS[program])
    assert_same(outcome(Automatic, True, **PROGRAMS[program]), expected)


# Its `global_step` counts the steps of each optimizer, so callbacks that begin at a step begin sooner with two.
@pytest.mark.parametrize("program", ["plain", "EMA from the first step"])
def test_manual_optimization_trains_tables_as_embeddings(program: str) -> None:
    expected = outcome(Manual, False, **PROGRAMS[program])
    assert_same(outcome(Manual, True, **PROGRAMS[program]), expected)


def test_a_frozen_table_does_not_train_until_it_is_thawed() -> None:
    before = Outcome.of(Automatic(True).model, [])
    drop_tables()
    after = outcome(Automatic, True, callbacks=[Thawing], epochs=1)
    users, items = (after.rows != before.rows).any(dim=1).chunk(2)
    assert not users.any()
    assert items.any()


def test_finetuning_of_a_sparse_optimizer_names_the_way() -> None:
    with pytest.raises(KeyError, match="is no parameter of a model: give this function the optimizer of the dense"):
        outcome(Manual, True, callbacks=[Thawing])


def test_groups_are_added_to_the_dense_optimizer_only() -> None:
    model, sparse = made(True)
    with pytest.raises(ValueError, match="SparseOptimizer takes no parameter groups"):
        BaseFinetuning.unfreeze_and_add_param_group(model.head, sparse)


class Alone(Automatic):
    """What is written for a model without tables: Adam over all parameters."""

    def __init__(self) -> None:
        super().__init__(True)
        self.sparse = None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_a_dense_optimizer_alone_warns_at_the_first_step_and_raises_at_the_second() -> None:
    module = Alone()
    sentence = "cannot step: its gradients stay collected and no row trains"
    with pytest.warns(UserWarning, match=sentence), pytest.raises(RuntimeError, match=sentence):
        trainer().fit(module, batches(), batches(2))
    assert len(module.losses) == 2


class Adversarial(pl.LightningModule):
    """Two networks that train in turn, while the parameters of the other one are frozen."""

    def __init__(self, over_tables: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.sparse = made(over_tables)
        self.critic = nn.Linear(1, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> None:
        first, second, *tables = self.optimizers()
        for optimizer, others, sign in ((first, tables, 1.0), (second, [], -1.0)):
            with optimizer.toggle_model():
                loss = sign * self.critic(self.model(batch[0]).unsqueeze(1)).tanh().mean()
                for each in (optimizer, *others):
                    each.zero_grad()
                self.manual_backward(loss)
                for each in (optimizer, *others):
                    each.step()
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        optimizers = [dense_optimizer(self.model), dense_optimizer(self.critic)]
        return optimizers if self.sparse is None else [*optimizers, self.sparse]


def test_networks_that_train_in_turn_freeze_the_tables_of_the_other() -> None:
    expected = outcome(Adversarial, False)
    assert_same(outcome(Adversarial, True), expected)
