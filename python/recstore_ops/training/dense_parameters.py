"""The dense parameters and buffers of a model: all that a run keeps of it outside its tables."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn

from recstore_ops.nn.table_parameter import without_stand_ins


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
