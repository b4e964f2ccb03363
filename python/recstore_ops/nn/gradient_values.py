"""`GradientValues`: the merged gradient of a table, as functions of torch read it.

The gradient of an `nn.Embedding` has a row for every id, this one a row for each id of the batches. All other elements
are alike: zero at first, and `f(0)` behind an elementwise function f. A reduction counts these too, so it gives what it
would give of the whole matrix. Functions that need the matrix itself are refused.

Shape suffixes: U ids with a gradient, D dim.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from recstore_ops.nn.allowed import (
    OF_SCALAR,
    OF_TORCH,
    SIZES,
    TEXTS,
    is_of_compiler,
    plain_name,
    size_of_table,
    without_override,
)
from recstore_ops.ops.operators import eager_only
from recstore_ops.table.copied_values import function_name
from recstore_ops.table.table import Table

_ELEMENTWISE = frozenset(
    {
        *("abs", "absolute", "neg", "negative", "mul", "multiply", "div", "divide", "true_divide", "add", "sub"),
        *("subtract", "pow", "square", "sqrt", "sign", "sgn", "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num"),
        *("isnan", "isinf", "isfinite", "exp", "log1p", "expm1", "tanh", "sigmoid", "relu", "round", "floor", "ceil"),
        *("trunc", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "double", "float", "half", "bfloat16", "bool"),
        *("clone", "detach", "contiguous", "cpu", "to", "type", "data"),
    }
)
"""Functions of each element alone, beside numbers."""
_OF_ONE = frozenset({"__bool__", "__float__", "__nonzero__"})
"""Operators of a single element, which are named as functions of `_ELEMENTWISE` are."""
_FLAT = frozenset({"view", "reshape", "flatten", "ravel"})
"""These keep the elements, and a flat form keeps what is said of them."""
_OF_STORAGE = {"untyped_storage", "_typed_storage", "storage_offset", "is_contiguous", "__cuda_array_interface__"}
_OF_VALUES = (OF_SCALAR | TEXTS | {"grad"}) - _OF_STORAGE


class GradientValues(Tensor):
    """The rows of a gradient that are not like all others, `[U, D]` or flat.

    Attributes:
        ids: of the rows, int64 `[U]`, ascending.
    """

    ids: Tensor
    _table: Table
    _owner: str
    _rest: Tensor
    """The value of every other element, 0-d."""

    @staticmethod
    def of(values: Tensor, ids: Tensor, table: Table, owner: str, rest: Tensor | None = None) -> GradientValues:
        """Returns values as those of a table's gradient; errors name its `owner`."""
        found = values.as_subclass(GradientValues)
        found.ids, found._table, found._owner = ids, table, owner
        found._rest = torch.zeros((), dtype=values.dtype, device=values.device) if rest is None else rest
        return found

    def plain(self) -> Tensor:
        """The same values as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def is_zero_elsewhere(self) -> bool:
        """Whether all other elements are zero."""
        return not bool(self._rest)

    def is_of(self, table: Table) -> bool:
        """Whether they may become the gradient that they were made of."""
        lent = table.lent()
        return self._table is table and self.ids is lent[0] and self.is_zero_elsewhere()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if name in _OF_VALUES or is_of_compiler(name) or (name in _OF_STORAGE and _is_of_torch()):
            return without_override(func, types, args, kwargs or {})
        return cls._called(func, name, args, kwargs or {})

    @staticmethod
    @eager_only  # Compilers leave the call to Python: a graph would hold the rows alone.
    def _called(func: Any, name: str, args: Any, kwargs: Any) -> Any:
        own, bare = args[0] if args else None, plain_name(name)
        if not isinstance(own, GradientValues):
            # A number before it, as in `2 * grad`, or a list of gradients.
            own = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, GradientValues))
        if name in SIZES and args[0] is own:
            return own._size(name, args[1:])
        if (found := _of_each(name, args, kwargs)) is not None:
            return found
        others = [*args, *kwargs.values()]
        is_alone = all(each is own or not isinstance(each, Tensor) or _is_number(each) for each in others)
        is_elementwise = bare in _ELEMENTWISE and name not in _OF_ONE
        if is_elementwise and is_alone and (name.startswith("__") or not name.endswith("_")):
            return own._mapped(func, args, kwargs)
        if name in _FLAT and args[1:] in ((), (-1,), ((-1,),), ([-1],)) and not kwargs:
            return GradientValues.of(own.plain().reshape(-1), own.ids, own._table, own._owner, own._rest)
        reduction = _REDUCTIONS.get(bare)
        if reduction is not None and args[0] is own and is_alone:
            found = _reduced(reduction, own, args[1:], kwargs)
            if found is not None:
                return found
        raise RuntimeError(
            f'"{name}" of the gradient of {own._owner} over table "{own._table.name}": its elements but those of '
            f"{own.ids.numel()} ids are alike and are not held. Elementwise functions and sum, mean, norm, max, min, "
            "any and all count them; .ids and plain() give the rows that are held"
        )

    def _size(self, name: str, args: Any) -> Any:
        """The answer to a function of `SIZES`: that of the whole gradient, and of a vector in its flat form."""
        size = size_of_table(name, self._table, args)
        if self.plain().dim() > 1 or name in ("numel", "nelement"):
            return size
        vector = (1,) if name == "stride" else torch.Size((size_of_table("numel", self._table, ()),))
        if name in ("shape", "size", "stride"):
            return vector[args[0]] if args else vector
        return vector[0] if name == "__len__" else 1

    def _mapped(self, func: Any, args: Any, kwargs: Any) -> Any:
        def called(value: Tensor) -> Any:
            return func(*(value if each is self else each for each in args), **kwargs)

        with torch.no_grad():
            found = called(self.plain())
            if not isinstance(found, Tensor):  # The name of a type, or no operation with such an operand.
                return found
            return GradientValues.of(found, self.ids, self._table, self._owner, called(self._rest))

    def _others(self) -> int:
        """How many elements are not held."""
        return size_of_table("numel", self._table, ()) - self.plain().numel()


def _is_of_torch() -> bool:
    """Whether torch itself asks how the rows lie: compilers look at what a frame begins with."""
    return not torch.compiler.is_dynamo_compiling() and sys._getframe(2).f_code.co_filename.startswith(OF_TORCH)


def _is_number(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.dim() == 0


def _of_each(name: str, args: Any, kwargs: Any) -> list[Tensor] | None:
    """The results of a function of lists, such as `_foreach_mul`, one by one; `None` if it is no such function."""
    function = plain_name(name)
    is_known = function in _ELEMENTWISE or function in _REDUCTIONS
    if not name.startswith("_foreach_") or name.endswith("_") or not is_known or not isinstance(args[0], list | tuple):
        return None
    call, found = getattr(torch, function), []
    for place, each in enumerate(args[0]):
        others = [other[place] if isinstance(other, list | tuple) else other for other in args[1:]]
        found.append(call(each, *others, **kwargs))
    return found


def _reduced(function: Callable[..., Tensor | None], own: GradientValues, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a reduction, or `None` for arguments that it does not take."""
    try:
        taken = inspect.signature(function).bind(own, *args, **kwargs)
    except TypeError:
        return None
    return function(*taken.args, **taken.kwargs)


def _with_rest(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """A reduction to one of the elements, or of what they say: that of the others goes in once."""

    def reduced(values: GradientValues) -> Tensor:
        held = values.plain().reshape(-1)
        return function(held if values._others() <= 0 else torch.cat([held, values._rest.reshape(1).to(held)]))

    return reduced


def _sum(values: GradientValues, *, dtype: torch.dtype | None = None) -> Tensor:
    others = max(values._others(), 0)
    # Nothing is added for zeros: infinity times zero is no number.
    rest = values._rest.to(torch.float64) * others if others and bool(values._rest) else 0
    total = values.plain().sum(dtype=dtype)
    return total + (rest.to(total) if isinstance(rest, Tensor) else rest)


def _mean(values: GradientValues, *, dtype: torch.dtype | None = None) -> Tensor | None:
    # Torch has no mean of truths.
    is_floating = values.plain().is_floating_point() if dtype is None else dtype.is_floating_point
    return _sum(values, dtype=dtype) / size_of_table("numel", values._table, ()) if is_floating else None


def _norm(
    values: GradientValues,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    if dim is not None or keepdim or out is not None or not values.is_zero_elsewhere():
        return None
    order = 2.0 if p in (None, "fro") else p
    if isinstance(order, str) or float(order) <= 0:
        return None
    held = values.plain().reshape(-1)
    return torch.linalg.vector_norm(held if held.numel() else held.new_zeros(1), float(order), dtype=dtype)


def _linalg_norm(
    values: GradientValues, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any
) -> Tensor | None:
    held = values.plain()
    if ord is None or held.dim() == 1:
        return _norm(values, ord, dim, keepdim, **options)
    # Of the matrix. Rows of zeros change none of these.
    if dim is not None or keepdim or options.get("out") is not None or not values.is_zero_elsewhere():
        return None
    if ord not in ("fro", "nuc") and (isinstance(ord, str) or float(ord) <= 0):
        return None
    return torch.linalg.norm(held if held.numel() else held.new_zeros(1, values._table.dim), ord, **options)


def _vector_norm(
    values: GradientValues, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Tensor | None:
    return _norm(values, ord, dim, keepdim, **options)


_REDUCTIONS: dict[str, Callable[..., Tensor | None]] = {
    "sum": _sum,
    "mean": _mean,
    "max": _with_rest(torch.max),
    "amax": _with_rest(torch.amax),
    "min": _with_rest(torch.min),
    "amin": _with_rest(torch.amin),
    "any": _with_rest(torch.any),
    "all": _with_rest(torch.all),
    "count_nonzero": lambda values: values.plain().count_nonzero() if values.is_zero_elsewhere() else None,
    "norm": _norm,
    "linalg_norm": _linalg_norm,
    "linalg_vector_norm": _vector_norm,
}


def is_reading(name: str) -> bool:
    """Whether `GradientValues` take a function, so that it may read a gradient."""
    bare = plain_name(name)
    is_in_place = (name.endswith("_") and not name.startswith("__")) or name.startswith("__i")
    return not is_in_place and name not in _OF_ONE and (bare in _ELEMENTWISE or name in _FLAT or bare in _REDUCTIONS)
