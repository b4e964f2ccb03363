"""Optimizers in double precision, written from their papers: the store's rules are held against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]


@dataclass
class Rows:
    """The rows of one step, `[U, D]`, two slots beside them, and how often each was stepped, now included."""

    weight: Array
    first: Array
    second: Array
    steps: Array


Rule = Callable[[Rows, Array, int], None]
"""Updates rows in place from their gradients at the table's step, which counts from 1."""


class LazyOptimizer:
    """Steps the rows of a weight that have a gradient, duplicates summed, and leaves the others alone."""

    def __init__(self, weight: torch.Tensor, rule: Rule) -> None:
        self._weight, self._rule, self._step = weight, rule, 0
        rows = weight.detach().numpy().astype(np.float64)
        self._rows = Rows(rows, np.zeros_like(rows), np.zeros_like(rows), np.zeros((len(rows), 1)))

    def step(self) -> None:
        assert self._weight.grad is not None
        grad = self._weight.grad.coalesce()
        ids, gradients = grad.indices()[0].numpy(), grad.values().numpy().astype(np.float64)
        self._step += 1
        self._rows.steps[ids] += 1
        names = ("weight", "first", "second", "steps")
        touched = Rows(*(getattr(self._rows, name)[ids] for name in names))
        self._rule(touched, gradients, self._step)
        for name in names:
            getattr(self._rows, name)[ids] = getattr(touched, name)
        with torch.no_grad():
            self._weight.copy_(torch.from_numpy(self._rows.weight))


def sgd(lr: float, weight_decay: float = 0.0) -> Rule:
    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        rows.weight -= lr * (gradient + weight_decay * rows.weight)

    return step


def adagrad(lr: float, eps: float = 1e-10, weight_decay: float = 0.0, torch_convention: bool = False) -> Rule:
    """Duchi, Hazan and Singer 2011."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        gradient = gradient + weight_decay * rows.weight
        rows.first += gradient**2
        rows.weight -= lr * gradient / _root(rows.first, eps, torch_convention)

    return step


def rowwise_adagrad(lr: float, eps: float = 1e-10, weight_decay: float = 0.0, torch_convention: bool = False) -> Rule:
    """One accumulator a row; the sum of squares, and their mean in the convention of torch."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        gradient = gradient + weight_decay * rows.weight
        reduce = np.mean if torch_convention else np.sum
        rows.first += reduce(gradient**2, axis=1, keepdims=True)
        rows.weight -= lr * gradient / _root(rows.first, eps, torch_convention)

    return step


def _root(squares: Array, eps: float, torch_convention: bool) -> Array:
    return np.sqrt(squares) + eps if torch_convention else np.sqrt(squares + eps)


def adam(lr: float, eps: float, weight_decay: float = 0.0, by_row: bool = False) -> Rule:
    """Kingma and Ba 2015, end of section 2, with betas (0.9, 0.999)."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        count = rows.steps if by_row else table_step
        _update_moments(rows, gradient + weight_decay * rows.weight)
        scale = lr * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        rows.weight -= scale * rows.first / (np.sqrt(rows.second) + eps)

    return step


def adamw(lr: float, eps: float, weight_decay: float = 0.01, by_row: bool = False) -> Rule:
    """Loshchilov and Hutter 2019, algorithm 2, with betas (0.9, 0.999)."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        count = rows.steps if by_row else table_step
        _update_moments(rows, gradient)
        mean, square = rows.first / (1 - 0.9**count), rows.second / (1 - 0.999**count)
        rows.weight -= lr * (mean / (np.sqrt(square) + eps) + weight_decay * rows.weight)

    return step


def _update_moments(rows: Rows, gradient: Array) -> None:
    rows.first[:] = 0.9 * rows.first + 0.1 * gradient
    rows.second[:] = 0.999 * rows.second + 0.001 * gradient**2


def ftrl(alpha: float, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> Rule:
    """McMahan et al. 2013, algorithm 1; a row that is new gets the z that its weights solve."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        n, z, weight = rows.first, rows.second, rows.weight
        solved = -weight * ((beta + np.sqrt(n)) / alpha + l2) - np.sign(weight) * l1
        z[:] = np.where(rows.steps == 1, solved, z)
        z += gradient - (np.sqrt(n + gradient**2) - np.sqrt(n)) / alpha * weight
        n += gradient**2
        moved = (np.sign(z) * l1 - z) / ((beta + np.sqrt(n)) / alpha + l2)
        weight[:] = np.where(np.abs(z) <= l1, 0.0, moved)

    return step
