"""Rows kept in memory after the first pass, if they are few enough."""

from __future__ import annotations

from collections.abc import Iterator

from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.row_source import DerivedRows, RowSource


class CachedRows(DerivedRows):
    """Keeps a source's rows in memory after the first whole pass if they need at most `max_bytes`.

    Rows that need more are read from the source in every pass. Where the first block tells that they will, nothing is
    kept, so that a single pass over many rows does not fill the memory first.
    """

    def __init__(self, source: RowSource, max_bytes: int) -> None:
        super().__init__(source)
        self._max_bytes = max_bytes
        self._blocks: list[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._blocks is not None:
            yield from self._blocks
            return
        blocks: list[Batch] | None = []
        free_bytes = self._max_bytes
        for block in self._source:
            free_bytes -= block.nbytes
            if blocks is not None and free_bytes >= 0 and (blocks or self._will_fit(block)):
                blocks.append(block)
            else:
                blocks = None
            yield block
        self._blocks = blocks

    def shard(self, index: int, count: int) -> CachedRows:
        """Returns a part that keeps its own rows, in its part of the memory."""
        return CachedRows(self._source.shard(index, count), self._max_bytes // count)

    def _will_fit(self, first: Batch) -> bool:
        num_rows = self._source.estimated_rows
        return num_rows is None or num_rows * first.nbytes <= self._max_bytes * len(first)
