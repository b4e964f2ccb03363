"""A publisher's part on another process than the first, whose tables are sharded over them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recstore_ops.serving.following.peer_ranks import OtherRanks
from recstore_ops.serving.following.publication_files import WRITING
from recstore_ops.serving.following.publisher import Publisher
from recstore_ops.serving.following.watches import TableWatch
from recstore_ops.serving.freezing import freeze_tables
from recstore_ops.serving.frozen_table import EncodingName
from recstore_ops.serving.program_tables import named_tables


class RankPublisher(Publisher):
    """Gives the first process the rows that it asks for.

    Args:
        directory: of the publication, as this process sees it.
        ranks: of the tables.

    Raises:
        RuntimeError: the first process could not begin.
    """

    def __init__(self, directory: Path, ranks: OtherRanks) -> None:
        super().__init__(directory)
        self._ranks = ranks
        self._encodings: dict[str, EncodingName] = {}
        self._watch: TableWatch | None = None
        # One job at a time, in the order of the first process's bases.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recstore-publish")
        self._is_open = True
        self._do: dict[str, Callable[[Any], Any]] = {
            "begin": self._begin,
            "take": self._take,
            "end": self._end,
            "base": self._write_base,
        }
        self._obey()

    def update(self) -> bool:
        """See `Publisher`."""
        return self._obey()

    def flush(self) -> None:
        """Returns at once: the first process writes."""

    def close(self) -> None:
        """See `Publisher`."""
        if not self._is_open:
            return
        try:
            self.update()
        finally:
            self._obey()
            self._is_open = False
            self._thread.shutdown()

    @property
    def number(self) -> int:
        """See `Publisher`."""
        return self._told.number

    @property
    def bytes_written(self) -> int:
        """See `Publisher`."""
        return self._told.bytes_written

    @property
    def address(self) -> str | None:
        """See `Publisher`."""
        return self._told.address

    def _due(self) -> int:
        return self._told.due

    def _look(self) -> None:
        self._obey()

    def abandon(self) -> None:
        """See `Publisher`."""
        self._is_open = False
        self._end(None)
        self._thread.shutdown()

    def _obey(self) -> bool:
        """Does what the first process asks for within a method."""
        if not self._is_open:
            raise self._is_closed()
        self._told = self._ranks.obey(lambda asked: self._do[asked.what](asked.argument))
        return self._told.result

    def _begin(self, encodings: dict[str, EncodingName]) -> None:
        if not self.directory.is_dir():
            raise ValueError(f"{self.directory} is not there: all processes must see the directory of a publication")
        self._encodings = encodings
        self._watch = TableWatch(named_tables(encodings), list(encodings.values()))

    def _take(self, was_told: bool) -> Any:
        assert self._watch is not None, "begin goes before take"
        return self._watch.take(was_told=was_told)

    def _end(self, _: None) -> None:
        if self._watch is not None:
            self._watch.end()

    def _write_base(self, _: None) -> None:
        """Begins to write this process's rows. A failure is an error of the first process's base too."""
        tables = named_tables(self._encodings)
        self._thread.submit(freeze_tables, self.directory / WRITING, tables, self._encodings, self._ranks.writing)
