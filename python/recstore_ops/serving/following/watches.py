"""Finds the changes of a model since the last call: rows of its tables, and its dense tensors."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from recstore_ops import _native
from recstore_ops.nn.table_parameter import without_stand_ins
from recstore_ops.serving.following.update import TableChanges
from recstore_ops.serving.frozen_table import EncodingName
from recstore_ops.table.table import Table


class TableWatch:
    """Notes which rows of tables change.

    Raises:
        RuntimeError: a table is watched already, or lies in another store than the others; servers do not answer.
    """

    def __init__(self, tables: Sequence[Table], encodings: Sequence[EncodingName]) -> None:
        self._names = [table.name for table in tables]
        self._ids = [table.table_id for table in tables]
        self._encodings = list(encodings)
        self._number = _native.begin_publication(self._ids)
        self._end = weakref.finalize(self, _end, self._ids, self._number)

    def take(self, *, was_told: bool) -> dict[str, TableChanges] | None:
        """Returns what changed in each table since this was asked last, those with changes only, all at one moment.

        Args:
            was_told: whether the last answer arrived; else it is a part of this one.

        Returns:
            None: changes are not noted any more, since a table was loaded anew or had no memory left for them.

        Raises:
            RuntimeError: a row has a value that its encoding has no number for, or cannot be read; servers do not
                answer, or another program publishes their tables.
        """
        taken = _native.take_changes(self._ids, list(self._encodings), self._number, was_told)
        if taken is None:
            return None
        changes = zip(self._names, (TableChanges(*each) for each in taken), strict=True)
        return {name: each for name, each in changes if each}

    def end(self) -> None:
        """Notes nothing any more."""
        self._end()


def _end(tables: list[int], number: int) -> None:
    with suppress(RuntimeError):  # A table was dropped: nothing is noted of it.
        _native.end_publication(tables, number)


class StateWatch:
    """Compares the dense tensors of a model with those that were published last.

    Args:
        model: whose parameters and buffers have the names of the program's state.
        names: those that the program has; constants among them never change.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._model, self._names = model, names
        self._told: dict[str, Tensor] = {}

    def take(self, *, everything: bool) -> dict[str, Tensor]:
        """Returns copies of the tensors that changed, or of all."""
        held: dict[str, Tensor] = {}
        held.update(without_stand_ins(self._model.named_parameters(remove_duplicate=False)))
        held.update(self._model.named_buffers(remove_duplicate=False))
        changed = {}
        for name in self._names & held.keys():
            value, told = held[name].detach(), self._told.get(name)
            if everything or told is None or not torch.equal(told, value):
                changed[name] = self._told[name] = value.to(device="cpu", copy=True).contiguous()
        return changed
