"""Two copies of a model: one answers while the other takes what changed, and then they change places.

So a reader never waits for an update and never sees a part of one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from recstore_ops.serving.following.update import Update
from recstore_ops.serving.frozen_table import FrozenMemory, FrozenTable
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.opening import BundleFiles


class ModelCopy:
    """A copy of a model.

    Args:
        graph: of its program.
        state: its tensors, handles of tables among them.
        handles: their names.
        tables: by their names.

    Attributes:
        tables: by their names.
        run: gives the outputs, flat, of inputs, flat.
        readers: how many read it.
    """

    def __init__(
        self, graph: Graph, state: dict[str, Tensor], handles: Collection[str], tables: dict[str, FrozenTable]
    ) -> None:
        self.tables = tables
        self.run = graph.bind(state)
        self.readers = 0
        self._graph, self._state = graph, state
        self._told = {name: value for name, value in state.items() if name not in handles}

    @property
    def told_bytes(self) -> int:
        """The bytes of all tensors that updates can change."""
        return sum(value.nbytes for value in self._told.values())

    def take(self, update: Update) -> None:
        """Takes an update. There must be no reader meanwhile.

        Raises:
            ValueError: it has a table or a tensor that the model has not, or of another shape or type.
            OSError: rows do not fit a table.
        """
        self._check(update)
        for name, changes in update.tables.items():
            try:
                self.tables[name].change(changes.ids, changes.rows, changes.deleted)
            except RuntimeError as error:
                raise OSError(f"{update.name} does not fit table {name!r}: {error}") from None
        if update.state:
            self._state.update(update.state)
            self.run = self._graph.bind(self._state)

    def _check(self, update: Update) -> None:
        for name in update.tables.keys() - self.tables.keys():
            raise ValueError(f"{update.name} has table {name!r}, which the model does not read")
        for name, value in update.state.items():
            own = self._told.get(name)
            if own is None:
                raise ValueError(f"{update.name} has tensor {name!r}, which the model does not have")
            expected, found = ((each.dtype, list(each.shape)) for each in (own, value))
            if expected != found:
                raise ValueError(f"{update.name} has tensor {name!r} as {found}, the model has {expected}")


class DoubleBuffer:
    """Both copies of the model of a base.

    Args:
        files: of the base.
        memory: of the tables.
        operators: what the graph may call.
        ended: once it is set, readers see no further update.

    Attributes:
        state_bytes: the bytes of all dense tensors in an update.

    Raises:
        ValueError, OSError: as `load_bundle`.
    """

    def __init__(self, files: BundleFiles, memory: FrozenMemory, operators: Operators, ended: threading.Event) -> None:
        graph = files.graph(operators)
        self.in_spec, self.out_spec = graph.in_spec, graph.out_spec
        # An update must not name a handle: it would be that of any table of this process.
        handles = {constant for table in files.manifest.tables for constant in table.constants}
        tables = (files.tables(memory) for _ in range(2))
        self._front, self._back = (ModelCopy(graph, files.state(graph, own), handles, own) for own in tables)
        self.state_bytes = self._front.told_bytes
        self._changed, self._ended = threading.Condition(), ended

    @property
    def front(self) -> ModelCopy:
        """The one that answers."""
        return self._front

    @contextmanager
    def read(self) -> Iterator[ModelCopy]:
        """Gives the copy that answers, which does not change meanwhile."""
        with self._changed:
            # Choosing and counting are one step: an update waits until the copy that it changes has no reader.
            side = self._front
            side.readers += 1
        try:
            yield side
        finally:
            with self._changed:
                side.readers -= 1
                self._changed.notify_all()

    def take(self, updates: Sequence[Update]) -> bool:
        """Takes updates. From one moment on, new readers see all of them.

        Returns:
            False: it ended meanwhile. Readers see none of the updates.

        Raises:
            As `ModelCopy.take`. Readers see no change, but these copies must not take another update.
        """
        if not self._apply(updates):
            return False
        with self._changed:
            if self._ended.is_set():
                return False
            # Under the lock by which readers choose a copy: each reads the one or the other to its end.
            self._front, self._back = self._back, self._front
        # The copy that answered until now takes the same updates, once its last reader has left: both are alike again.
        self._apply(updates)
        return True

    def wake(self) -> None:
        """Has `take` see that it ended."""
        with self._changed:
            self._changed.notify_all()

    def _apply(self, updates: Sequence[Update]) -> bool:
        """Applies updates to the copy that does not answer, once it has no readers. False: it ended before."""
        with self._changed:
            self._changed.wait_for(lambda: self._back.readers == 0 or self._ended.is_set())
            if self._ended.is_set():
                return False
        for update in updates:
            self._back.take(update)
        return True
