"""The tables of a model that is published: what changed in them, and all of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from recstore_ops.serving.exporting import ExportedModel
from recstore_ops.serving.following.peer_ranks import PeerRanks
from recstore_ops.serving.following.update import TableChanges
from recstore_ops.serving.following.watches import TableWatch
from recstore_ops.serving.frozen_table import EncodingName

_Changes = dict[str, TableChanges] | None


class PublishedTables:
    """The tables of a model: rows of this process, or of servers, and those of other processes.

    Args:
        exported: the model.
        encodings: of its tables, by their names.
        others: the processes that have rows too.
    """

    def __init__(self, exported: ExportedModel, encodings: Mapping[str, EncodingName], others: PeerRanks) -> None:
        self._exported, self._encodings, self._others = exported, dict(encodings), others
        self._watch: TableWatch | None = None

    def begin(self) -> None:
        """Notes changes from here on.

        Raises:
            RuntimeError: as `TableWatch`, on any process.
        """
        self._others.ask("begin", self._encodings, self._begin)

    def _begin(self) -> None:
        tables = list(self._exported.tables.values())
        self._watch = TableWatch(tables, [self._encodings[table.name] for table in tables])

    def take(self, *, was_told: bool) -> _Changes:
        """Returns what changed since this was asked last; see `TableWatch.take`.

        Raises:
            RuntimeError: as there, on any process.
        """
        watch = self._watch
        assert watch is not None, "begin goes before take"
        taken = self._others.ask("take", was_told, lambda: watch.take(was_told=was_told))
        whole = [changes for changes in taken if changes is not None]
        return _merged(whole) if len(whole) == len(taken) else None

    def end(self) -> None:
        """Notes nothing any more."""
        self._others.ask("end", None, self.end_here)

    def end_here(self) -> None:
        """Notes nothing any more in this process."""
        if self._watch is not None:
            self._watch.end()

    def announce_base(self) -> None:
        """Has the other processes write their rows for the base that this one is about to write."""
        self._others.ask("base", None, lambda: None)

    def write_base(self, directory: Path) -> None:
        """Writes the model with all rows.

        Raises:
            OSError, RuntimeError: as `ExportedModel.write`.
        """
        self._exported.write(directory, self._encodings, self._others.writing, graph_only=True)


def _merged(taken: Iterable[dict[str, TableChanges]]) -> dict[str, TableChanges]:
    """Merges the changes of several processes, each with rows of its own, by table."""
    of_each: dict[str, list[TableChanges]] = {}
    for changes in taken:
        for name, of_one in changes.items():
            of_each.setdefault(name, []).append(of_one)
    return {name: parts[0] if len(parts) == 1 else _joined(parts) for name, parts in of_each.items()}


def _joined(parts: list[TableChanges]) -> TableChanges:
    columns = zip(*((part.ids, part.rows, part.deleted) for part in parts), strict=True)
    return TableChanges(*map(b"".join, columns))
