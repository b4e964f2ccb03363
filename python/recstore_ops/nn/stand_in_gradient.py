"""`StandInGradient`: the `.grad` of a `TableParameter`.

Functions that measure, scale or clip the gradients of all parameters of a model reach what the table has collected
through it. To all others it is a zero, so that an optimizer of `torch.optim` steps a scalar that means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from recstore_ops.table.table import Table, open_tables

_NORMS = {"linalg_vector_norm", "linalg_norm", "norm", "_foreach_norm"}
_LOOKED_FOR = {"isnan", "isinf", "isfinite"}
# Each module's share may be scaled by itself, and the sum is scaled.
_SCALED = {"mul_", "multiply_", "div_", "divide_", "true_divide_", "_foreach_mul_", "_foreach_div_"}
_CLAMPED = {
    *("clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_"),
    *("_foreach_clamp_min_", "_foreach_clamp_max_"),
}
_REACHING = _NORMS | _LOOKED_FOR | _SCALED | _CLAMPED
# `GradScaler.unscale_` of a dense optimizer: that of the `SparseOptimizer` unscales what was collected.
_ABOUT_THE_SCALAR = {"requires_grad_", "detach_", "_amp_foreach_non_finite_check_and_unscale_"}

_without_override = torch._C._disabled_torch_function_impl


class StandInGradient(Tensor):
    """A zero, through which some functions reach the merged gradients `[U, dim]` of a table.

    Norms, `isnan`, `isinf` and `isfinite` are theirs. `mul_`, `div_`, `clamp_` and `nan_to_num_` change them, and
    `zero_` drops them. Other changes in place are refused.
    """

    _table: Table
    _owner: str

    @staticmethod
    def of(table: Table, like: Tensor, owner: str) -> StandInGradient:
        """Returns the gradient of a stand-in; errors name its `owner`."""
        grad = torch.zeros_like(like).as_subclass(StandInGradient)
        grad._table, grad._owner = table, owner
        return grad

    def stands_for(self, table: Table) -> bool:
        """Whether this is about what a table has collected."""
        return self._table is table

    def merged(self, function: str) -> Tensor:
        """The collected gradients, merged and flat, for a function to read or to change.

        Raises:
            RuntimeError: the table is sharded, or other modules have collected for it and the function is not linear.
        """
        if self._table.is_sharded:
            raise self._refusal(
                function, "its rows lie on several ranks: SparseOptimizer.clip_grad_norm_ clips by the norm over all"
            )
        if function not in _SCALED and any(_shares(self._table, other) for other in open_tables()):
            raise self._refusal(
                function, "other modules have collected for it too: SparseOptimizer.clip_grad_norm_ adds them up first"
            )
        lent = self._table.lend_collected()
        if lent is None or lent.numel() == 0:
            return torch.zeros(1, dtype=torch.float32, device="cpu")
        return lent.view(-1)

    def _refusal(self, function: str, why: str) -> RuntimeError:
        return RuntimeError(f'"{function}" of the gradient of {self._owner} over table "{self._table.name}": {why}')

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "detach" or func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0]
        for grad in _stand_ins(args[:1]):
            if name in ("zero_", "_foreach_zero_"):
                grad._table.clear_collected()
            elif name in _REACHING:
                return _reached(func, *args, **kwargs)
            elif _changes(name):
                raise grad._refusal(
                    name, "it stands for what the table collected, which mul_, div_, clamp_ and zero_ change"
                )
        return _without_override(func, types, args, kwargs)


def _stand_ins(values: Iterable[Any]) -> list[StandInGradient]:
    flat = (each for value in values for each in (value if isinstance(value, list | tuple) else [value]))
    return [each for each in flat if isinstance(each, StandInGradient)]


def _shares(table: Table, other: Table) -> bool:
    return other is not table and other.name == table.name and other.has_collected()


def _changes(function: str) -> bool:
    if function in _ABOUT_THE_SCALAR:
        return False
    return function == "__setitem__" or (function.endswith("_") and not function.endswith("__"))


def _reached(func: Any, grads: Any, *others: Any, **options: Any) -> Any:
    """Calls a function with what was collected in the place of a stand-in's gradient, or of those in a list."""
    name = func.__name__
    if isinstance(grads, StandInGradient):
        result = func(grads.merged(name), *map(_near, others), **options)
        return grads if name in _SCALED | _CLAMPED else result.to(grads.device)
    results: list[Tensor] = []
    for place, grad in enumerate(grads):
        own = [[other[place]] if isinstance(other, list | tuple) else other for other in others]
        if isinstance(grad, StandInGradient):
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
