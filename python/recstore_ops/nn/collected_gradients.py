"""`CollectedGradients`: what stands for a table where torch expects a parameter with a `.grad`.

`torch.amp.GradScaler` and `torch.nn.utils.clip_grad_norm_` find gradients as `.grad` of the parameters of an optimizer
and change them in place. A table is no tensor, so the parameter is a scalar without meaning, and its `.grad` is lent
from the collectors of the table's modules; a step takes it back as it then is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.table.table import Table

_unscaled: WeakKeyDictionary[Table, tuple[int, bool]] = WeakKeyDictionary()
"""How often a table was cleared when it was noted, and whether a function had its gradients themselves."""


def note_passed_over(tables: Iterable[Table]) -> None:
    """Notes that a `GradScaler` has unscaled gradients of a dense optimizer that has stand-ins of tables."""
    for table in tables:
        if _unscaled.get(table) != (table.times_cleared, True):
            _unscaled[table] = (table.times_cleared, False)


def check_unscaled(tables: list[Table]) -> None:
    """Refuses a step with gradients that a `GradScaler` has passed over, and forgets what was noted of the others.

    Raises:
        RuntimeError: there are some.
    """
    if not _unscaled:
        return
    for table in tables:
        if _unscaled.get(table) == (table.times_cleared, False) and table.has_collected():
            raise RuntimeError(
                f'table "{table.name}": its gradients are still scaled, for a GradScaler has unscaled those of an '
                "optimizer of torch.optim alone: give it the SparseOptimizer too, by scaler.step(optimizer)"
            )
    for table in tables:
        _unscaled.pop(table, None)


class CollectedGradients(Tensor):
    """A scalar whose `.grad` is what was collected for one table.

    `CollectedGradients.of(find_tables)` makes one: `find_tables()` gives all `Table`s of one name.
    """

    _find_tables: Callable[[], list[Table]]

    @staticmethod
    def of(find_tables: Callable[[], list[Table]]) -> CollectedGradients:
        parameter = torch.zeros((), dtype=torch.float32, device="cpu").as_subclass(CollectedGradients)
        parameter.requires_grad_()
        parameter._find_tables = find_tables
        return parameter

    # Whoever looks it up among the parameters of a model has an error with its representation.
    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            "a stand-in for gradients in a parameter group of SparseOptimizer, which is no parameter of a model: give "
            "this function the optimizer of the dense parameters alone, and call SparseOptimizer.step in a hook of it, "
            "register_step_post_hook"
        )

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The merged gradients, float32 `[U, dim]`, to be changed in place; `None` if none were collected."""
        tables = self._find_tables()
        for table in tables:
            _unscaled[table] = (table.times_cleared, True)
        return _gather(tables).lend_collected() if tables else None


def _gather(tables: list[Table]) -> Table:
    """Moves what several modules collected for one table to the first of them."""
    first, *others = tables
    for other in others:
        for _, ids, grads in other.collected():
            # The sum of all modules is what torch scales or clips. The next step then finds it with the first of them.
            operators.accept_grad(first.collector, first.handle, ids, grads, None)
            other.clear_collected()
    return first
