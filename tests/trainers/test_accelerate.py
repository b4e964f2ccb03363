"""Programs of Hugging Face accelerate over tables, beside the same ones over `nn.Embedding`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from clicks import Outcome, assert_same, batches, dense_optimizer, made
from conftest import drop_tables
from torch import Tensor


class Program(NamedTuple):
    """A model, and what accelerate made of its optimizers, schedulers and batches."""

    accelerator: Accelerator
    model: Any
    loader: Any
    optimizers: list[Any]
    schedulers: list[Any]

    @staticmethod
    def made(over_tables: bool, accumulated: int = 1) -> Program:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        model, sparse = made(over_tables)
        optimizers = [dense_optimizer(model), *([] if sparse is None else [sparse])]
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 5, 0.5) for each in optimizers]
        model, loader, *prepared = accelerator.prepare(model, batches(), *optimizers, *schedulers)
        return Program(accelerator, model, loader, prepared[: len(optimizers)], prepared[len(optimizers) :])

    def step(self, batch: Any, max_norm: float | None) -> tuple[float, Tensor | None]:
        """The loss of a batch, and the norm of the gradients if they are applied."""
        with self.accelerator.accumulate(self.model):
            loss = self.model.loss(batch)
            self.accelerator.backward(loss)
            norm = None
            if self.accelerator.sync_gradients and max_norm is not None:
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
            for each in [*self.optimizers, *self.schedulers]:
                each.step()
            for each in self.optimizers:
                each.zero_grad()
        return loss.item(), norm

    def trained(self, epochs: int, max_norm: float | None = None) -> tuple[Outcome, list[Tensor]]:
        """What training gave, and the norms before clipping."""
        steps = [self.step(batch, max_norm) for _ in range(epochs) for batch in self.loader]
        outcome = Outcome.of(self.accelerator.unwrap_model(self.model), [loss for loss, _ in steps])
        return outcome, [norm for _, norm in steps if norm is not None]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_prepared_program_trains_tables_as_embeddings(accumulated: int) -> None:
    expected, norms_before = Program.made(False, accumulated).trained(2, max_norm=0.05)
    outcome, norms = Program.made(True, accumulated).trained(2, max_norm=0.05)
    assert_same(outcome, expected)
    torch.testing.assert_close(norms, norms_before, rtol=1e-5, atol=1e-6)
    assert min(norms) > 0.05  # Else nothing was clipped.


def test_gradients_are_clipped_by_value_as_those_of_embeddings() -> None:
    outcomes = []
    for over_tables in (False, True):
        program = Program.made(over_tables)
        for batch in program.loader:
            program.accelerator.backward(program.model.loss(batch))
            program.accelerator.clip_grad_value_(program.model.parameters(), 0.001)
            for each in program.optimizers:
                each.step()
            for each in program.optimizers:
                each.zero_grad()
        outcomes.append(Outcome.of(program.accelerator.unwrap_model(program.model), []))
    assert_same(outcomes[1], outcomes[0])


def resumed(over_tables: bool, folder: Path) -> Outcome:
    """Trains and saves; then a model made anew goes on."""
    first = Program.made(over_tables)
    first.trained(2)
    first.accelerator.save_state(str(folder))
    del first
    drop_tables()
    rest = Program.made(over_tables)
    rest.accelerator.load_state(str(folder))
    return rest.trained(2)[0]


def test_training_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    expected = resumed(False, tmp_path / "dense")
    assert_same(resumed(True, tmp_path / "tables"), expected)
    drop_tables()
    whole, _ = Program.made(True).trained(4)
    assert_same(expected, whole._replace(losses=whole.losses[-len(expected.losses) :]))


def test_a_step_that_accumulates_changes_no_row() -> None:
    program = Program.made(True, accumulated=4)
    before = Outcome.of(program.accelerator.unwrap_model(program.model), [])
    for number, batch in enumerate(program.loader, start=1):
        program.step(batch, None)
        rows = Outcome.of(program.accelerator.unwrap_model(program.model), []).rows
        assert torch.equal(rows, before.rows) == (number < 4)
        if number == 4:
            return


def test_a_dense_optimizer_alone_is_refused_at_its_second_step() -> None:
    accelerator = Accelerator(cpu=True)
    model = made(True)[0]  # Without the optimizer of its tables.
    gc.collect()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))

    def step() -> None:
        accelerator.backward(model.loss(next(iter(batches()))))
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match="no row trains"):
        step()
    with pytest.raises(RuntimeError, match="no row trains"):
        step()
