"""`TableParameter`: what stands for a table among the parameters of a model.

A table is no tensor, but freezing and clearing gradients go through `parameters()`: `module.requires_grad_(False)`,
loops that set `requires_grad`, `model.zero_grad()`, `p.grad = None`. The stand-in hands these to its table. It is a
scalar that says the type and the device of the module, and an optimizer of `torch.optim` that is given it changes no
row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops.nn.stand_in_gradient import StandInGradient
from recstore_ops.nn.table_rows import FILLS, RowsOfTable
from recstore_ops.table.refusals import refused_for_rows
from recstore_ops.table.table import Table

_own = torch._C.TensorBase


class TableParameter(nn.Parameter):
    """A scalar in the place of a table; `TableParameter.of` makes one."""

    _table: Table
    _owner: str

    @staticmethod
    def of(
        table: Table, dtype: torch.dtype, owner: str, requires_grad: bool = True, device: torch.device | None = None
    ) -> TableParameter:
        """Returns the stand-in of a table, on the default device as other parameters; errors name its `owner`."""
        with torch.inference_mode(False):
            parameter = Tensor._make_subclass(TableParameter, torch.zeros((), dtype=dtype, device=device))
        parameter._table, parameter._owner = table, owner
        parameter.requires_grad = requires_grad
        return parameter

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the table collects gradients through this module."""
        return self._table.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self._table.requires_grad = requires_grad
        _own.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]

    def requires_grad_(self, requires_grad: bool = True) -> TableParameter:  # type: ignore[override]
        """Freezes the table for this module, or thaws it."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:
        """A `StandInGradient` if the table has collected gradients, else `None`; setting it to `None` drops them."""
        if not self._table.has_collected():
            return None
        return StandInGradient.of(self._table, _own.detach(self), f"the parameter of {self._owner}")

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:  # type: ignore[override]
        # After `p.grad *= 0.5` Python sets it to what it is already.
        if isinstance(grad, StandInGradient) and grad.stands_for(self._table):
            return
        if grad is not None:
            raise self._refusal("grad")
        self._table.clear_collected()

    @property
    def data(self) -> RowsOfTable:  # type: ignore[override]
        """A stand-in for the rows, for averages of parameters; functions that fill it are refused."""
        return self.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        self._set_scalar(data, "data")

    def detach(self) -> RowsOfTable:  # type: ignore[override]
        """A stand-in for the rows, for averages of parameters."""
        return RowsOfTable.of(self._table, _own.detach(self), f"the parameter of {self._owner}")

    def copy_(self, other: Tensor, non_blocking: bool = False) -> TableParameter:
        """Takes an average of rows, or a scalar, as optimizers of `model.parameters()` hand it back; refuses rows."""
        if isinstance(other, TableParameter | RowsOfTable):
            self.detach().copy_(other.detach())
        else:
            self._set_scalar(other, "copy_")
        return self

    def lerp_(self, end: Tensor, weight: float | Tensor) -> TableParameter:  # type: ignore[override]
        """Moves the rows towards those of another table's stand-in."""
        self.detach().lerp_(end.detach(), weight)
        return self

    def _set_scalar(self, value: Any, attribute: str) -> None:
        if not isinstance(value, Tensor) or value.dim() > 0:
            raise self._refusal(attribute)
        _own.detach(self).copy_(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(Tensor, name):
            raise self._refusal(name)
        super().__setattr__(name, value)

    def _refusal(self, attribute: str) -> AttributeError:
        return refused_for_rows(f"the parameter of {self._owner}", self._table.name, attribute)

    def moved(self, function: Callable[[Tensor], Tensor]) -> TableParameter:
        """Takes the type and the device of a conversion; returns a new parameter if torch cannot change this one."""
        tensor = function(_own.detach(self))
        if not torch._has_compatible_shallow_copy_type(self, tensor):  # type: ignore[attr-defined]
            return TableParameter.of(self._table, tensor.dtype, self._owner, self.requires_grad, tensor.device)
        _own.data.__set__(self, tensor)  # type: ignore[attr-defined]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        if id(self) not in memo:
            table = copy.deepcopy(self._table, memo)
            memo[id(self)] = TableParameter.of(table, self.dtype, self._owner, self.requires_grad, self.device)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., nn.Parameter], tuple[Any, ...]]:
        # A module makes its stand-in anew. A program has it alone, and must not open the table where it is loaded.
        return (_scalar, (self.dtype, self.requires_grad))


def _scalar(dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    """A parameter without a table."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device="cpu"), requires_grad)


def without_stand_ins(parameters: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters that are dense."""
    return ((name, parameter) for name, parameter in parameters if not isinstance(parameter, TableParameter))


def _refusing(method: str) -> Callable[..., Any]:
    def refuse(self: TableParameter, *args: Any, **kwargs: Any) -> None:
        raise self._refusal(method)

    return refuse


for _method in FILLS:
    setattr(TableParameter, _method, _refusing(_method))
