"""Hooks of the parameter that stands for a table, called with the merged gradient of one backward pass.

Torch's own would be called with None: the functions of lookups give the parameter no gradient. A pass collects apart
from what passes before it have collected, and its gradients join these behind the hooks, when it ends. Those of a pass
that raises are dropped with it.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from recstore_ops.nn.gradient_values import GradientValues
from recstore_ops.ops import operators
from recstore_ops.ops.collecting import hooked
from recstore_ops.table.table import Table, open_tables

Hook = Callable[[Any], Any]


class GradientHooks:
    """The hooks of one parameter, which alone keeps them.

    Args:
        table: of the parameter.
        owner: of the parameter, for messages.
    """

    def __init__(self, table: Table, owner: str) -> None:
        self._table, self._owner = weakref.ref(table), owner
        self._before: OrderedDict[int, Hook] = OrderedDict()
        self._after: OrderedDict[int, Callable[[], Any]] = OrderedDict()
        # Each pass of a thread, and each within another one, by the number of its graph task. The task itself keeps it.
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        self._is_beginning = threading.Lock()
        # As torch takes one for each parameter: a hook may start a pass of its own, and those of threads take turns.
        self._is_ending = threading.RLock()
        number = int(table.collector)
        hooked[number] = weakref.WeakMethod(self._begin)
        weakref.finalize(table, hooked.pop, number, None)

    def add(self, hook: Hook, method: str) -> RemovableHandle:
        """Adds one that may give other values for the gradient of a pass; errors name the `method`."""
        return self._added(self._before, hook, method)

    def add_after(self, hook: Callable[[], Any], method: str) -> RemovableHandle:
        """Adds one that is called when the gradient of a pass is among those collected."""
        return self._added(self._after, hook, method)

    def _added(self, hooks: OrderedDict[int, Any], hook: Any, method: str) -> RemovableHandle:
        table = self._table()
        if table is not None and not table.requires_grad:
            raise RuntimeError(
                f'"{method}" of the parameter of {self._owner} over table "{table.name}": it is frozen, and its hooks '
                "would not be called; thaw it by requires_grad_(True)"
            )
        if table is not None:
            self._check_is_alone(table, method)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def is_waiting(self) -> bool:
        """Whether the backward pass under way has gradients for the hooks, and runs nodes yet."""
        found = self._passes.get(torch._C._current_graph_task_id())  # type: ignore[attr-defined]
        return found is not None and not found.is_over

    def _begin(self, collector: Tensor) -> Tensor:
        """Returns the collector of a pass in the place of the table's."""
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        table = self._table()
        if table is None or not (self._before or self._after):
            return collector
        if task == -1:
            raise RuntimeError(
                f'table "{table.name}": hooks on the parameter of {self._owner} are called at the end of a backward '
                "pass, and these gradients come in none"
            )
        self._check_is_alone(table, "backward")
        with self._is_beginning:  # The engine has a thread for each device.
            if (found := self._passes.get(task)) is None:
                found = self._passes[task] = _Pass(self, task)
                _queue(found.end)
        return found.collector

    def _end(self, collector: Tensor) -> None:
        with self._is_ending:
            if (table := self._table()) is None or operators.collected_tables(collector).numel() == 0:
                return
            self._check_is_alone(table, "backward")
            ids, rows = operators.collected_grads(collector, table.handle)
            rows = self._called(ids, rows, table)
            if not table.requires_grad:  # A hook froze it.
                return
            operators.accept_grad(table.collector, table.handle, ids, rows, None)
            for hook in [*self._after.values()]:
                if hook() is not None:
                    raise RuntimeError(
                        f'a post-accumulate hook on the parameter of {self._owner} over table "{table.name}" must give '
                        "None"
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
            found = result.plain()
            if found.dtype != rows.dtype or found.shape != rows.shape or found.device != rows.device:
                raise RuntimeError(
                    f'a hook on the parameter of {self._owner} over table "{table.name}" must give values of the type '
                    f"and the shape of its gradient, {rows.dtype} in rows, got {found.dtype} "
                    f"{'in rows' if found.dim() == rows.dim() else 'in a vector'}"
                )
            values = result
        return values.plain()

    def _check_is_alone(self, table: Table, function: str) -> None:
        """Refuses hooks if another module collects a part of the gradient."""
        for other in open_tables():
            is_module = type(other.anchor) is not Tensor
            if other is not table and other.name == table.name and is_module and other.requires_grad:
                raise RuntimeError(
                    f'"{function}" of the parameter of {self._owner} over table "{table.name}" with hooks: another '
                    f"module, {other.owner}, collects for the table too, so a hook would get a part of the gradient; "
                    "look up through one module, or freeze the other one by requires_grad_(False)"
                )


class _Pass:
    """The gradients of one backward pass, until it ends."""

    def __init__(self, hooks: GradientHooks, task: int) -> None:
        self._hooks, self._task = hooks, task
        self.is_over = False
        self.collector = operators.make_collector()
        weakref.finalize(self, _release, self.collector)

    def end(self) -> None:
        # Rows that were staged are collected in callbacks too, all of which are queued by now.
        self.is_over = True
        _queue(self._end)

    def _end(self) -> None:
        self._hooks._passes.pop(self._task, None)
        self._hooks._end(self.collector)


def _release(collector: Tensor) -> None:
    with _disable_current_modes():
        operators.collector_release(collector)


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(callback)


def check_passes(tables: Iterable[Table]) -> None:
    """Refuses a step within a backward pass whose gradients wait for hooks: it would leave them out.

    Raises:
        RuntimeError: there are some.
    """
    if not hooked:
        return
    for table in tables:
        begin = hooked.get(int(table.collector), lambda: None)()
        hooks = getattr(begin, "__self__", None)
        if isinstance(hooks, GradientHooks) and hooks.is_waiting():
            raise RuntimeError(
                f'table "{table.name}": its parameter has hooks, which are called at the end of the backward pass, and '
                "this step is within the pass: step behind backward(), or in a post-accumulate hook of that parameter"
            )
