"""The optimizers of `torch.optim` by name, for a model's parameters outside the tables."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# They need the loss computed again, sparse gradients, or matrices only.
_UNSUITABLE = ("LBFGS", "SparseAdam", "Muon", "Optimizer")
_CLASSES: dict[str, type[Any]] = {
    name.lower(): kind
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and name not in _UNSUITABLE
}


def dense_optimizer_names() -> list[str]:
    """Returns the names that `make_dense_optimizer` takes, in lower case."""
    return sorted(_CLASSES)


def check_dense_optimizer(name: str, options: dict[str, Any]) -> None:
    """Tries the optimizer on a parameter.

    Raises:
        ValueError: an unknown name or option, or a value that the optimizer refuses.
    """
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    make_dense_optimizer(name, [parameter], lr=1.0, options=options)


def make_dense_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, lr: float, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Returns the optimizer of `torch.optim` of that name, in any case.

    Raises:
        ValueError: an unknown name or option, or a value that the optimizer refuses.
    """
    kind = _CLASSES.get(name.lower())
    if kind is None:
        raise ValueError(f"dense_optimizer must be one of {', '.join(dense_optimizer_names())}, got {name!r}")
    _, _, *accepted = inspect.signature(kind).parameters
    unknown = sorted(options.keys() - set(accepted))
    if unknown:
        raise ValueError(f"torch.optim.{kind.__name__} takes no {', '.join(unknown)}; it takes {', '.join(accepted)}")
    try:
        return kind(list(parameters), lr=lr, **options)
    except TypeError as error:
        raise ValueError(f"torch.optim.{kind.__name__}: {error}") from error
