"""The dense parameters and buffers of a model: all that a run keeps of it outside its tables."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops.nn.table_parameter import without_stand_ins

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


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the dense parameters and buffers by name; not the `state_dict`, which has the rows of tables."""
    for name, tensor in chain(without_stand_ins(model.named_parameters()), model.named_buffers()):
        yield name, tensor.detach()


def load_dense_parameters(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Gives a model the values that `dense_parameters` yielded.

    Raises:
        ValueError: the model has other parameters, or one of another shape.
    """
    own = dict(dense_parameters(model))
    if own.keys() != saved.keys():
        raise ValueError(f"the model has the parameters {sorted(own)}, those saved are {sorted(saved)}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"parameter {name} of the model has the shape {tuple(tensor.shape)}, the one saved "
                f"{tuple(saved[name].shape)}"
            )
    for name, tensor in own.items():
        tensor.copy_(saved[name])
