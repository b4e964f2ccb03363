"""Hooks of the parameter that stands for a table, called with the merged gradient of one backward pass.

Torch's own would be called with None: the functions of lookups give the parameter no gradient.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from recstore_ops.nn.gradient_values import GradientValues
from recstore_ops.ops import operators
from recstore_ops.ops.collecting import hooked
from recstore_ops.table.table import Table

Hook = Callable[[Any], Any]


class GradientHooks:
    """The hooks of one parameter.

    Args:
        table: of the parameter.
        owner: of the parameter, for messages.
    """

    def __init__(self, table: Table, owner: str) -> None:
        self._table, self._owner = weakref.ref(table), owner
        self._before: OrderedDict[int, Hook] = OrderedDict()
        self._after: OrderedDict[int, Callable[[], Any]] = OrderedDict()
        self._pass: int | None = None
        self._collected: list[tuple[str, Tensor, Tensor]] = []
        number = int(table.collector)
        hooked[number] = self._begin
        weakref.finalize(table, hooked.pop, number, None)

    def add(self, hook: Hook) -> RemovableHandle:
        """Adds one that may give other values for the gradient of a pass."""
        handle = RemovableHandle(self._before)
        self._before[handle.id] = hook
        return handle

    def add_after(self, hook: Callable[[], Any]) -> RemovableHandle:
        """Adds one that is called when the gradient of a pass is among those collected."""
        handle = RemovableHandle(self._after)
        self._after[handle.id] = hook
        return handle

    def _begin(self) -> None:
        # A pass collects for each lookup; the first one sets apart what passes before have collected.
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        table = self._table()
        if table is None or not (self._before or self._after) or self._pass == task:
            return
        if task == -1:
            raise RuntimeError(
                f'table "{table.name}": hooks on the parameter of {self._owner} are called at the end of a backward '
                "pass, and these gradients come in none"
            )
        self._collected = table.collected()
        operators.clear_grads(table.collector)
        self._pass = task
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(self._end)

    def _end(self) -> None:
        self._pass = None
        before, self._collected = self._collected, []
        if (table := self._table()) is None:
            return
        found = table.collected()
        operators.clear_grads(table.collector)
        try:
            given = [(name, ids, self._called(ids, rows, table)) for name, ids, rows in found]
        except BaseException:
            _accept(table, [*before, *found])
            raise
        _accept(table, [*before, *given])
        for hook in [*self._after.values()]:
            if hook() is not None:
                raise RuntimeError(
                    f'a post-accumulate hook on the parameter of {self._owner} over table "{table.name}" must give None'
                )

    def _called(self, ids: Tensor, rows: Tensor, table: Table) -> Tensor:
        values = GradientValues.of(rows, ids, table, self._owner)
        for hook in [*self._before.values()]:
            result = hook(values)
            if result is None:
                continue
            if not (isinstance(result, GradientValues) and result.ids is ids and result.is_zero_elsewhere()):
                raise RuntimeError(
                    f'a hook on the parameter of {self._owner} over table "{table.name}" must give values made of its '
                    f"gradient, which are zero for ids without one, got {type(result).__name__}"
                )
            values = result
        return values.plain().reshape(rows.shape)


def _accept(table: Table, collected: list[tuple[str, Tensor, Tensor]]) -> None:
    for _, ids, rows in collected:
        operators.accept_grad(table.collector, table.handle, ids, rows, None)
