"""`TableParameter`: what stands for a table among the parameters of a model.

A table is no tensor, but freezing and clearing gradients go through `parameters()`: `module.requires_grad_(False)`,
loops that set `requires_grad`, `model.zero_grad()`, `p.grad = None`. The stand-in hands these to its table. It is a
scalar that says the type and the device of the module, and an optimizer of `torch.optim` that is given it changes no
row.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from recstore_ops.nn.allowed import (
    OF_SCALAR,
    SIZES,
    TEXTS,
    StandIn,
    check_is_stepped,
    dense_step,
    is_exporting,
    is_of_compiler,
    is_of_optimizer,
    plain_name,
    size_of_table,
    without_override,
)
from recstore_ops.nn.collected_gradients import note_passed_over
from recstore_ops.nn.frozen_states import leave_out_of_state
from recstore_ops.nn.gradient_hooks import GradientHooks, Hook
from recstore_ops.nn.gradient_values import GradientValues, is_reading
from recstore_ops.nn.table_rows import OF_ROWS, RULES, RowsOfTable, check_unchanged
from recstore_ops.ops import asked_gradients
from recstore_ops.ops.operators import eager_only
from recstore_ops.table.copied_values import flat, function_name
from recstore_ops.table.refusals import refused_for_rows, refused_for_sharded_hooks
from recstore_ops.table.table import Table, open_tables

# Each module's share may be scaled by itself, and the sum is scaled.
_SCALED = {"mul_", "multiply_", "div_", "divide_", "true_divide_", "_foreach_mul_", "_foreach_div_"}
# These are zero for zero, or are refused.
_CLAMPED = {"clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_"}
_CLAMPED_LISTS = {"_foreach_clamp_min_", "_foreach_clamp_max_"}
_DROPPING = {"zero_", "_foreach_zero_"}
_REACHING = {"_foreach_norm"} | _CLAMPED_LISTS | _SCALED
# `GradScaler.unscale_` of a dense optimizer: that of the `SparseOptimizer` unscales what was collected.
_UNSCALING = "_amp_foreach_non_finite_check_and_unscale_"
_ABOUT_THE_SCALAR = {"requires_grad_", _UNSCALING}


class StandInGradient(StandIn, Tensor):
    """A zero, through which some functions reach the merged gradients `[U, dim]` of a table.

    Norms, `isnan`, `isinf` and `isfinite` are theirs. `mul_`, `div_`, `clamp_` and `nan_to_num_` change them, and
    `zero_` drops them. Other changes in place are refused.
    """

    _table: Table
    _owner: str
    _cleared: int
    """How often gradients of the table had been dropped before those that this stands for."""
    _is_zeroed = False

    @staticmethod
    def of(table: Table, like: Tensor, owner: str) -> StandInGradient:
        """Returns the gradient of a stand-in; errors name its `owner`."""
        with _disable_current_modes():  # Tracers look at the `.grad` of what they trace.
            grad = Tensor._make_subclass(StandInGradient, torch.zeros_like(like))
        grad._table, grad._owner, grad._cleared = table, owner, table.times_cleared
        return grad

    def stands_for(self, table: Table) -> bool:
        """Whether this is about the gradient of a table, and none that was dropped since."""
        return self._table is table and self._cleared == table.times_cleared

    def merged(self, function: str) -> Tensor:
        """The collected gradients, merged and flat, for a function to read or to change.

        Raises:
            RuntimeError: the table is sharded, or other modules have collected for it and the function is not linear.
        """
        if self._table.is_sharded:
            raise self._refusal(
                function, "its rows lie on several ranks: SparseOptimizer.clip_grad_norm_ clips by the norm over all"
            )
        # A factor may go to each module's part by itself. A norm or a bound is one of the sum, which no part shows.
        if function not in _SCALED and any(_shares(self._table, other) for other in open_tables()):
            raise self._refusal(
                function, "other modules have collected for it too: SparseOptimizer.clip_grad_norm_ adds them up first"
            )
        lent = self._table.lend_collected() if self._cleared == self._table.times_cleared else None
        if lent is None and not self._is_zeroed:
            raise self._refusal(function, "a step applied it, or it was dropped: p.grad.clone() keeps what is there")
        if lent is None or lent.numel() == 0:
            # One zero, not none: torch has no maximum norm of an empty tensor.
            return torch.zeros(1, dtype=torch.float32, device="cpu")
        return lent.view(-1)

    def read_by(self, function: str) -> GradientValues:
        """A copy of the collected gradients, merged, for a function to read; errors as those of `merged`."""
        self.merged(function)
        ids, rows = self._table.lent()
        return GradientValues.of(rows.clone(), ids, self._table, self._owner)

    def assign(self, values: Any) -> StandInGradient:
        """Takes values that were made of this gradient in its place.

        Raises:
            RuntimeError: others, or values that are not zero for ids without a gradient.
        """
        held = self.merged("data")
        if not (isinstance(values, GradientValues) and values.is_of(self._table)):
            raise self._refusal("data", "only values made of itself may take its place, which are zero for other ids")
        held.copy_(values.plain().reshape(-1))
        return self

    def _refusal(self, function: str, why: str) -> RuntimeError:
        return RuntimeError(f'"{function}" of the gradient of {self._owner} over table "{self._table.name}": {why}')

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function_name(func), kwargs or {}
        grad = _stand_ins(tree_leaves((args, kwargs)))[0]
        # `p.grad.data.mul_()` and `p.grad.detach().zero_()` are to reach the table too, and not a plain zero.
        if name in ("detach", "detach_", "data"):
            return args[0]
        if name in TEXTS:
            return f'StandInGradient(table "{grad._table.name}")'
        if name == _UNSCALING:
            note_passed_over(each._table for each in _stand_ins(args))
        if name in OF_SCALAR or name in _ABOUT_THE_SCALAR or name == "grad" or is_of_compiler(name):
            return without_override(func, types, args, kwargs)
        own = _stand_ins(args[:1])
        if own and name in SIZES:
            return size_of_table(name, grad._table, args[1:])
        is_change = own and (name in _DROPPING or name in _REACHING or name in _CLAMPED or name == "data=")
        if not is_change and dense_step():
            return without_override(func, types, args, kwargs)
        return grad._called(func, name, args, kwargs)

    @eager_only  # Compilers leave the call to Python: a graph would hold the collected rows alone.
    def _called(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        grad = self
        if own := _stand_ins(args[:1]):
            if name in _DROPPING:
                for each in own:
                    each._table.clear_collected()
                    each._cleared, each._is_zeroed = each._table.times_cleared, True
                return grad if name == "zero_" else None
            if name in _REACHING:
                return _reached(func, *args, **kwargs)
            if name in _CLAMPED:
                return grad.assign(_reading(name)(grad.read_by(name), *args[1:], **kwargs))
            if name == "data=":
                return own[0].assign(args[1])
        if is_reading(name):
            target = kwargs.pop("out", None)
            found = func(*_read_by(name, args), **_read_by(name, kwargs))
            return found if target is None else target.assign(found)
        raise grad._refusal(name, "it stands for what the table collected, which mul_, div_, clamp_ and zero_ change")


def _read_by(function: str, values: Any) -> Any:
    """Arguments with what was collected in the places of gradients."""
    return tree_map(lambda each: each.read_by(function) if isinstance(each, StandInGradient) else each, values)


def _reading(function: str) -> Callable[..., Any]:
    """The function that gives what one in place would write."""
    return getattr(torch, plain_name(function))


def _stand_ins(values: Iterable[Any]) -> list[StandInGradient]:
    return [each for each in flat(values) if isinstance(each, StandInGradient)]


def _shares(table: Table, other: Table) -> bool:
    return other is not table and other.name == table.name and other.has_collected()


def _reached(func: Any, grads: Any, *others: Any, **options: Any) -> Any:
    """Calls a function with what was collected in the place of a stand-in's gradient, or of those in a list."""
    name = func.__name__
    if isinstance(grads, StandInGradient):
        result = func(grads.merged(name), *map(_near, others), **options)
        return grads if name in _SCALED else result.to(grads.device)
    results: list[Tensor] = []
    for place, grad in enumerate(grads):
        own = [[other[place]] if isinstance(other, list | tuple) else other for other in others]
        if isinstance(grad, StandInGradient) and name in _CLAMPED_LISTS:
            bound = own[0][0] if isinstance(own[0], list) else own[0]
            grad.assign(_reading(name)(grad.read_by(name), _near(bound)))
            found = None
        elif isinstance(grad, StandInGradient):
            found = func([grad.merged(name)], *map(_near, own), **options)
        else:
            found = func([grad], *own, **options)
        results += [] if found is None else [each.to(grad.device) for each in found]
    return results or None


def _near(value: Any) -> Any:
    """A factor in host memory, which holds the collected gradients."""
    if isinstance(value, list):
        return [_near(each) for each in value]
    return value.cpu() if isinstance(value, Tensor) else value


_own = torch._C.TensorBase
_OWN = __name__.partition(".")[0] + "."


def scalar_of(parameter: Tensor) -> Tensor:
    """The scalar behind a stand-in, without its meaning."""
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        return Tensor._make_subclass(Tensor, parameter)


class TableParameter(StandIn, nn.Parameter):
    """A scalar in the place of a table; `TableParameter.of` makes one."""

    _reference: weakref.ref[Table]
    """Not the table itself: that has this parameter as its anchor, and ends when its module does."""
    _kept: Table | None = None
    """The table of a copy of the parameter alone."""
    _name: str
    _owner: str
    _hooks: GradientHooks | None = None

    @property
    def _table(self) -> Table:
        if (table := self._reference()) is None:
            raise RuntimeError(
                f'the {self._owner} of this parameter over table "{self._name}" is gone, and its rows are reached '
                "through it: keep the module as long as its parameters"
            )
        return table

    def table_of_rows(self) -> Table:
        """The table of its module."""
        return self._table

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Compiled lookups give the anchor to the operators that collect; compilers know no more than this of them.
        if func is asked_gradients.accept_asked_grad or func is asked_gradients.accept_asked_bag_grads:
            return without_override(func, types, args, kwargs or {})
        name, kwargs = function_name(func), kwargs or {}
        # A graph calls operators with an order by the first, a transform the functions of lookups by the second.
        if name == "with_effects" or (name == "custom_function_call" and args[0].__module__.startswith(_OWN)):
            return without_override(func, types, args, kwargs)
        # `get_gradient_edge` of torch finds the node of a leaf by `view_as`; `backward` has it among its `inputs`.
        is_input = name == "backward" and not any(isinstance(each, TableParameter) for each in flat(args[:1]))
        if (name == "view_as" and args[0] is args[1]) or is_input:
            return without_override(func, types, args, kwargs)
        if name in OF_SCALAR or is_of_compiler(name):
            return without_override(func, types, args, kwargs)
        own = next(each for each in flat([*args, *kwargs.values()]) if isinstance(each, TableParameter))
        if name in TEXTS:
            return f'TableParameter(table "{own._table.name}", requires_grad={own.requires_grad})'
        if name in SIZES and args[0] is own:
            return size_of_table(name, own._table, args[1:])
        # Some optimizers make their state before the first step.
        if dense_step() or (name.endswith("_like") and is_of_optimizer()):
            return without_override(func, types, args, kwargs)
        # Under no_grad an expression of parameters is about rows, as averages of models write it.
        if name in OF_ROWS or ((name == "clone" or plain_name(name) in RULES) and not torch.is_grad_enabled()):
            return func(*_detached(args), **_detached(kwargs))
        raise own._refusal(name)

    @staticmethod
    def of(
        table: Table, dtype: torch.dtype, owner: str, requires_grad: bool = True, device: torch.device | None = None
    ) -> TableParameter:
        """Returns the stand-in of a table, on the default device as other parameters; errors name its `owner`."""
        # A parameter made in inference mode could never be on autograd's tape.
        with torch.inference_mode(False):
            parameter = Tensor._make_subclass(TableParameter, torch.zeros((), dtype=dtype, device=device))
        parameter._reference, parameter._name, parameter._owner = weakref.ref(table), table.name, owner
        table.anchor = parameter
        table.requires_grad = requires_grad
        return parameter

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the table collects gradients through this module."""
        table = self._reference()
        if table is None or table.requires_grad or torch.compiler.is_compiling():
            return table is not None and table.requires_grad
        return leave_out_of_state(sys._getframe(1))

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self._table.requires_grad = requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> TableParameter:  # type: ignore[override]
        """Freezes the table for this module, or thaws it."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:
        """A `StandInGradient` if the table has collected gradients, else `None`; setting it to `None` drops them."""
        if not self._table.has_collected():
            return None
        if (step := dense_step()) is not None:
            check_is_stepped(self._table, self._owner, step)
        return StandInGradient.of(self._table, scalar_of(self), f"the parameter of {self._owner}")

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:  # type: ignore[override]
        # After `p.grad *= 0.5` Python sets it to what it is already.
        if isinstance(grad, StandInGradient) and grad.stands_for(self._table):
            return
        if isinstance(grad, GradientValues) and isinstance(own := self.grad, StandInGradient):
            own.assign(grad)
            return
        if grad is not None:
            raise self._refusal("grad")
        self._table.clear_collected()

    @grad.deleter
    def grad(self) -> None:  # type: ignore[override]
        self._table.clear_collected()

    @property
    def data(self) -> RowsOfTable:  # type: ignore[override]
        """A stand-in for the rows, for averages of parameters; functions that fill it are refused."""
        return self.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        if not isinstance(data, RowsOfTable):
            raise self._refusal("data")
        own = self.detach()
        check_unchanged(data, "data")
        if data.is_view_of_rows() and data.table is own.table:
            return
        if data.is_view_of_rows():
            raise RuntimeError(
                f'"data" of the parameter of {self._owner} over table "{self._name}": tensors would share memory with '
                f'table "{data.table.name}" from now on, and tables do not: data.clone() or copy_ give it the rows'
            )
        own.copy_(data)
        # In torch tensors that were taken before keep the rows of before.
        self._table.times_bound += 1

    def detach(self) -> RowsOfTable:  # type: ignore[override]
        """A stand-in for the rows, for averages of parameters."""
        return RowsOfTable.of(self._table, scalar_of(self), f"the parameter of {self._owner}")

    def __setattr__(self, name: str, value: Any) -> None:
        # A note that a program leaves here for its optimizer would reach no row, so it is refused.
        if not name.startswith("_") and not hasattr(Tensor, name):
            raise self._refusal(name)
        super().__setattr__(name, value)

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Calls a hook with the gradient of each backward pass, `GradientValues`; a hook may give others made of it."""
        return self._all_hooks("register_hook").add(hook, "register_hook")

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Calls a hook with this parameter when `grad` holds the gradient of a backward pass too."""
        method, own = "register_post_accumulate_grad_hook", weakref.ref(self)
        return self._all_hooks(method).add_after(lambda: hook(own()), method)  # type: ignore[arg-type]

    def _all_hooks(self, method: str) -> GradientHooks:
        table = self._table
        if table.is_sharded:
            raise refused_for_sharded_hooks(f"the parameter of {self._owner}", table.name, method)
        if self._hooks is None:
            self._hooks = GradientHooks(table, self._owner)
        return self._hooks

    def _refusal(self, attribute: str) -> AttributeError:
        return refused_for_rows(f"the parameter of {self._owner}", self._table.name, attribute)

    def moved(self, function: Callable[[Tensor], Tensor]) -> TableParameter:
        """Takes the type and the device of a conversion; returns a new parameter if torch cannot change this one."""
        tensor = function(scalar_of(self))
        # `nn.Module._apply` asks the same: `data` may be set only between tensors of compatible types.
        if not torch._has_compatible_shallow_copy_type(self, tensor):  # type: ignore[attr-defined]
            return TableParameter.of(self._table, tensor.dtype, self._owner, self.requires_grad, tensor.device)
        with torch._C.DisableTorchFunctionSubclass():
            _own.data.__set__(self, tensor)  # type: ignore[attr-defined]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        if id(self) not in memo:
            table = copy.deepcopy(self._table, memo)
            copied = TableParameter.of(table, self.dtype, self._owner, self.requires_grad, self.device)
            memo[id(self)] = copied
            copied._kept = table
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., nn.Parameter], tuple[Any, ...]]:
        # A module makes its stand-in anew. A program has it alone, and must not open the table where it is loaded.
        if not is_exporting():
            raise RuntimeError(
                f'a pickle of the parameter of {self._owner} over table "{self._name}" has no rows: pickle the module, '
                "or save its state_dict()"
            )
        return (_scalar, (self.dtype, self.requires_grad))


def _scalar(dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    """A parameter without a table."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device="cpu"), requires_grad)


def without_stand_ins(parameters: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters that are dense."""
    return ((name, parameter) for name, parameter in parameters if not isinstance(parameter, TableParameter))


def _detached(values: Any) -> Any:
    """Arguments with what stands for rows in the place of parameters."""
    return tree_map(lambda each: each.detach() if isinstance(each, TableParameter) else each, values)
