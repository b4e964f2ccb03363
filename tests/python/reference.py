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
    """The rows of one step, `[U, D]`, three slots beside them, and how often each was stepped, now included."""

    weight: Array
    first: Array
    second: Array
    third: Array
    steps: Array


Rule = Callable[[Rows, Array, int], None]
"""Updates rows in place from their gradients at the table's step, which counts from 1."""


class LazyOptimizer:
    """Steps the rows of a weight that have a gradient, duplicates summed, and leaves the others alone."""

    def __init__(self, weight: torch.Tensor, rule: Rule) -> None:
        self._weight, self._rule, self._step = weight, rule, 0
        rows = weight.detach().numpy().astype(np.float64)
        first, second, third = (np.zeros_like(rows) for _ in range(3))
        self._rows = Rows(rows, first, second, third, np.zeros((len(rows), 1)))

    def step(self) -> None:
        assert self._weight.grad is not None
        grad = self._weight.grad.coalesce()
        ids, gradients = grad.indices()[0].numpy(), grad.values().numpy().astype(np.float64)
        self._step += 1
        self._rows.steps[ids] += 1
        names = ("weight", "first", "second", "third", "steps")
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


def momentum(lr: float, share: float, nesterov: bool = False, weight_decay: float = 0.0) -> Rule:
    """Sutskever et al. 2013, section 2."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        gradient = gradient + weight_decay * rows.weight
        rows.first[:] = share * rows.first + gradient
        rows.weight -= lr * (gradient + share * rows.first if nesterov else rows.first)

    return step


def adagrad(
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    torch_convention: bool = False,
    lr_decay: float = 0.0,
) -> Rule:
    """Duchi, Hazan and Singer 2011."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        gradient = gradient + weight_decay * rows.weight
        rows.first += gradient**2
        rate = lr / (1 + (table_step - 1) * lr_decay)
        rows.weight -= rate * gradient / _root(rows.first, eps, torch_convention)

    return step


def rowwise_adagrad(lr: float, eps: float = 1e-10, weight_decay: float = 0.0, torch_convention: bool = False) -> Rule:
    """One accumulator a row; the sum of squares, and their mean in the convention of torch."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        gradient = gradient + weight_decay * rows.weight
        reduce = np.mean if torch_convention else np.sum
        rows.first += reduce(gradient**2, axis=1, keepdims=True)
        rows.weight -= lr * gradient / _root(rows.first, eps, torch_convention)

    return step


def rmsprop(
    lr: float, alpha: float, eps: float, centered: bool = False, share: float = 0.0, weight_decay: float = 0.0
) -> Rule:
    """Tieleman and Hinton 2012, lecture 6.5; centered: Graves 2013, equations 38 to 41."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        gradient = gradient + weight_decay * rows.weight
        rows.first[:] = alpha * rows.first + (1 - alpha) * gradient**2
        rows.second[:] = alpha * rows.second + (1 - alpha) * gradient
        square = rows.first - rows.second**2 if centered else rows.first
        rows.third[:] = share * rows.third + gradient / (np.sqrt(square) + eps)
        rows.weight -= lr * rows.third

    return step


def adadelta(lr: float, rho: float, eps: float, weight_decay: float = 0.0) -> Rule:
    """Zeiler 2012, algorithm 1."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        gradient = gradient + weight_decay * rows.weight
        rows.first[:] = rho * rows.first + (1 - rho) * gradient**2
        moved = np.sqrt(rows.second + eps) / np.sqrt(rows.first + eps) * gradient
        rows.second[:] = rho * rows.second + (1 - rho) * moved**2
        rows.weight -= lr * moved

    return step


def _root(squares: Array, eps: float, torch_convention: bool) -> Array:
    return np.sqrt(squares) + eps if torch_convention else np.sqrt(squares + eps)


def adam(
    lr: float, eps: float, weight_decay: float = 0.0, by_row: bool = False, beta2: float = 0.999, amsgrad: bool = False
) -> Rule:
    """Kingma and Ba 2015, end of section 2, with a first beta of 0.9; Reddi, Kale and Kumar 2018, algorithm 2."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        count = rows.steps if by_row else table_step
        square = _updated_square(rows, gradient + weight_decay * rows.weight, beta2, amsgrad)
        scale = lr * np.sqrt(1 - beta2**count) / (1 - 0.9**count)
        rows.weight -= scale * rows.first / (np.sqrt(square) + eps)

    return step


def adamw(
    lr: float, eps: float, weight_decay: float = 0.01, by_row: bool = False, beta2: float = 0.999, amsgrad: bool = False
) -> Rule:
    """Loshchilov and Hutter 2019, algorithm 2, with a first beta of 0.9."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        count = rows.steps if by_row else table_step
        square = _updated_square(rows, gradient, beta2, amsgrad) / (1 - beta2**count)
        mean = rows.first / (1 - 0.9**count)
        rows.weight -= lr * (mean / (np.sqrt(square) + eps) + weight_decay * rows.weight)

    return step


def rowwise_adam(lr: float, eps: float, weight_decay: float = 0.0, by_row: bool = False) -> Rule:
    """Adam with the mean of a row's squares in the second moment; FBGEMM's `PARTIAL_ROWWISE_ADAM`."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        count = rows.steps if by_row else table_step
        gradient = gradient + weight_decay * rows.weight
        rows.first[:] = 0.9 * rows.first + 0.1 * gradient
        rows.second[:] = 0.999 * rows.second + 0.001 * np.mean(gradient**2, axis=1, keepdims=True)
        scale = lr * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        rows.weight -= scale * rows.first / (np.sqrt(rows.second) + eps)

    return step


def lamb(lr: float, eps: float, weight_decay: float = 0.0, by_row: bool = False) -> Rule:
    """You et al. 2020, algorithm 2, its layers being rows."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        count = rows.steps if by_row else table_step
        square = _updated_square(rows, gradient, 0.999, False) / (1 - 0.999**count)
        direction = rows.first / (1 - 0.9**count) / (np.sqrt(square) + eps) + weight_decay * rows.weight
        length, norm = (np.linalg.norm(each, axis=1, keepdims=True) for each in (rows.weight, direction))
        ratio = np.where((length > 0) & (norm > 0), length / np.where(norm > 0, norm, 1), 1)
        rows.weight -= lr * ratio * direction

    return step


def lion(lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> Rule:
    """Chen et al. 2023, algorithm 2."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        sign = np.sign(betas[0] * rows.first + (1 - betas[0]) * gradient)
        rows.weight[:] = rows.weight * (1 - lr * weight_decay) - lr * sign
        rows.first[:] = betas[1] * rows.first + (1 - betas[1]) * gradient

    return step


def _updated_square(rows: Rows, gradient: Array, beta2: float, amsgrad: bool) -> Array:
    """Moves both moments and returns the second that counts."""
    rows.first[:] = 0.9 * rows.first + 0.1 * gradient
    rows.second[:] = beta2 * rows.second + (1 - beta2) * gradient**2
    rows.third[:] = np.maximum(rows.third, rows.second)
    return rows.third if amsgrad else rows.second


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
