"""Learning rate schedules of a run: what the configured rates are multiplied with, step by step.

linear and cosine fall towards zero over the whole run, by the share of its rows that is done; for files that share is
an estimate until the first epoch is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

ScheduleName = Literal["constant", "linear", "cosine", "exponential", "plateau"]

# Not zero: FTRL divides by its rate, and a step at the rate zero would be wasted.
_MIN_FACTOR = 1e-6


class Schedule:
    """Sets the learning rates of optimizers; whatever they were at construction is a factor of 1.

    Args:
        optimizers: the tables' and the dense parameters'.
        name: what the factor follows beside the warmup.
        epochs: of the whole run.
        warmup_steps: the first steps, in which the factor rises in equal parts from zero.
        gamma: of exponential, a factor an epoch; of plateau, a factor each time the logloss does not fall.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        name: ScheduleName,
        *,
        epochs: int,
        warmup_steps: int = 0,
        gamma: float | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._initial = [group["lr"] for group in self._groups()]
        self._name = name
        self._epochs = epochs
        self._warmup_steps = warmup_steps
        self._gamma = 1.0 if gamma is None else gamma
        self._plateau_factor = 1.0
        self._lowest = math.inf

    def before_step(self, step: int, epochs_done: float) -> None:
        """Sets the rates of a step.

        Args:
            step: its number, from 1.
            epochs_done: passes over the rows before it, with a fraction.
        """
        factor = max(_MIN_FACTOR, self.factor(step, epochs_done))
        for group, initial in zip(self._groups(), self._initial, strict=True):
            group["lr"] = initial * factor

    def after_evaluation(self, logloss: float) -> None:
        """Takes the validation logloss, which plateau follows."""
        if logloss < self._lowest:
            self._lowest = logloss
        elif self._name == "plateau":
            self._plateau_factor *= self._gamma

    def factor(self, step: int, epochs_done: float) -> float:
        """Returns what the initial rates are multiplied with."""
        warmup = min(1.0, step / self._warmup_steps) if self._warmup_steps else 1.0
        share = min(1.0, epochs_done / self._epochs)
        match self._name:
            case "constant":
                return warmup
            case "linear":
                return warmup * (1 - share)
            case "cosine":
                return warmup * 0.5 * (1 + math.cos(math.pi * share))
            case "exponential":
                return warmup * self._gamma ** math.floor(epochs_done)
        return warmup * self._plateau_factor

    def state_dict(self) -> dict[str, Any]:
        """Returns what evaluations have changed."""
        return {"plateau_factor": self._plateau_factor, "lowest": self._lowest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self._plateau_factor, self._lowest = state["plateau_factor"], state["lowest"]

    def _groups(self) -> list[dict[str, Any]]:
        # Asked for anew each time: an optimizer that loads its state has other groups from then on.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]
