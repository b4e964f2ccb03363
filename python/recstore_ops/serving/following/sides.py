"""Two copies of a model: one answers while the other takes what changed, and then they change places.

So a reader never waits for an update and never sees a part of one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from recstore_ops.serving.following.publication import Update
from recstore_ops.serving.frozen_table import FrozenMemory, FrozenTable
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.opening import BundleFiles


class Side:
    """A copy of a model.

    Attributes:
        tables: by their names.
        run: gives the outputs, flat, of inputs, flat.
        update: the last one that it took; None: those of its base.
        readers: how many read it.
    """

    def __init__(self, graph: Graph, state: dict[str, Tensor], tables: dict[str, FrozenTable]) -> None:
        self.tables = tables
        self.run = graph.bind(state)
        self.update: Update | None = None
        self.readers = 0
        self._graph, self._state = graph, dict(state)

    def take(self, update: Update) -> None:
        """Takes an update. Nobody may read meanwhile.

        Raises:
            ValueError: it has a table or a tensor that the model has not, or of another shape.
            RuntimeError: rows do not fit a table.
        """
        for name in update.tables.keys() - self.tables.keys():
            raise ValueError(f"{update.name} has table {name!r}, which the model does not read")
        for name, value in update.state.items():
            own = self._state.get(name)
            if own is None or (own.shape, own.dtype) != (value.shape, value.dtype):
                raise ValueError(f"{update.name} has tensor {name!r}, which the model has not in this shape")
        for name, changes in update.tables.items():
            self.tables[name].change(changes.ids, changes.rows, changes.deleted)
        if update.state:
            self._state.update(update.state)
            self.run = self._graph.bind(self._state)
        self.update = update


class Sides:
    """Both copies of the model of a base.

    Raises:
        ValueError, OSError: as `load_bundle`.
    """

    def __init__(self, files: BundleFiles, memory: FrozenMemory, operators: Operators) -> None:
        graph, tables = files.graph(operators), (files.tables(memory) for _ in range(2))
        self.in_spec, self.out_spec = graph.in_spec, graph.out_spec
        self._front, self._back = (Side(graph, files.state(graph, own), own) for own in tables)
        self._changed = threading.Condition()

    @property
    def front(self) -> Side:
        """The one that answers."""
        return self._front

    @contextmanager
    def read(self) -> Iterator[Side]:
        """Gives the copy that answers, which does not change meanwhile."""
        with self._changed:
            side = self._front
            side.readers += 1
        try:
            yield side
        finally:
            with self._changed:
                side.readers -= 1
                self._changed.notify_all()

    def take(self, updates: Sequence[Update]) -> None:
        """Takes updates: those who begin to read have all of them, from one moment on.

        Raises:
            As `Side.take`. Those who read see nothing of it, but these copies are good for no other update.
        """
        self._apply(updates)
        with self._changed:
            self._front, self._back = self._back, self._front
        self._apply(updates)

    def _apply(self, updates: Sequence[Update]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._back.readers == 0)
        for update in updates:
            self._back.take(update)
