"""The interface of a stream of rows, and a stream of rows in memory.

A `RowSource` can be iterated repeatedly. It yields the same rows in the same order each time, in blocks of any size.
Only `CachedRows` may hold a whole file, up to its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.ops.integers import as_int64
from recstore_ops.training.data.batch import Batch


@dataclass(frozen=True)
class SkippedRows:
    """The bad rows of one file that a pass left out: their number, the position of the first, and its error."""

    path: Path
    count: int
    first: str


class RowSource(Protocol):
    """A stream of rows that starts anew with every iteration."""

    def __iter__(self) -> Iterator[Batch]: ...

    @property
    def estimated_rows(self) -> int | None:
        """Rows of one pass: exact after a whole pass, an estimate before, None if unknown."""
        ...

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the F fields of every row."""
        ...

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the J dense features of every row."""
        ...

    def shard(self, index: int, count: int) -> RowSource:
        """Returns the `index`-th of `count` parts, which are disjoint and have all rows between them.

        Raises:
            ValueError: `index` is not in [0, count).
        """
        ...

    @property
    def has_labels(self) -> bool:
        """Whether rows have labels; those without have NaN."""
        return True

    @property
    def sequences(self) -> tuple[tuple[str, str], ...]:
        """Pairs of names, a field that is a sequence and the field whose ids it has, as the columns' roles say."""
        return ()

    @property
    def group_name(self) -> str | None:
        """The name of the rows' groups; None if batches have no groups."""
        return None

    @property
    def group_texts(self) -> Mapping[int, str]:
        """The text of each group that was read so far."""
        return {}

    @property
    def skipped(self) -> tuple[SkippedRows, ...]:
        """The bad rows left out in the latest pass, an entry for each file that has any."""
        return ()

    @property
    def skipped_lines(self) -> int:
        """Bad rows left out in the latest pass."""
        return sum(file.count for file in self.skipped)

    @property
    def first_skipped(self) -> str | None:
        """The position of the first of them, and what was expected there."""
        return self.skipped[0].first if self.skipped else None


class MemoryRows(RowSource):
    """The rows of one batch in memory, as a source.

    Args:
        batch: the rows.
        field_names: None numbers the fields.
        dense_names: None numbers the dense features.
        sequences: pairs of names of fields, a sequence and the one whose ids it has.
        group_name: the name of the rows' groups, if they have groups.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        field_names: Sequence[str] | None = None,
        dense_names: Sequence[str] | None = None,
        sequences: Sequence[tuple[str, str]] = (),
        group_name: str | None = None,
    ) -> None:
        num_dense = 0 if batch.dense is None else batch.dense.shape[1]
        self._batch = batch
        self._field_names = _names(field_names, "field", batch.num_fields)
        self._dense_names = _names(dense_names, "dense", num_dense)
        self._sequences = tuple(sequences)
        self._group_name = group_name

    def __iter__(self) -> Iterator[Batch]:
        if len(self._batch) > 0:
            yield self._batch

    @property
    def estimated_rows(self) -> int:
        return len(self._batch)

    @property
    def field_names(self) -> tuple[str, ...]:
        return self._field_names

    @property
    def dense_names(self) -> tuple[str, ...]:
        return self._dense_names

    @property
    def sequences(self) -> tuple[tuple[str, str], ...]:
        return self._sequences

    @property
    def group_name(self) -> str | None:
        return self._group_name

    def shard(self, index: int, count: int) -> MemoryRows:
        check_shard(index, count)
        own = torch.arange(len(self._batch), dtype=torch.int64, device="cpu")[index::count]
        part = copy(self)
        part._batch = self._batch.take(own)
        return part


class DerivedRows(RowSource):
    """The properties that a source made from another one shares with it."""

    def __init__(self, source: RowSource) -> None:
        self._source = source

    @property
    def estimated_rows(self) -> int | None:
        return self._source.estimated_rows

    @property
    def field_names(self) -> tuple[str, ...]:
        return self._source.field_names

    @property
    def dense_names(self) -> tuple[str, ...]:
        return self._source.dense_names

    @property
    def has_labels(self) -> bool:
        return self._source.has_labels

    @property
    def sequences(self) -> tuple[tuple[str, str], ...]:
        return self._source.sequences

    @property
    def group_name(self) -> str | None:
        return self._source.group_name

    @property
    def group_texts(self) -> Mapping[int, str]:
        return self._source.group_texts

    @property
    def skipped(self) -> tuple[SkippedRows, ...]:
        return self._source.skipped


class MappedRows(DerivedRows):
    """The rows of a source with other ids; `map_ids` takes and returns int64 [N]."""

    def __init__(self, source: RowSource, map_ids: Callable[[Tensor], Tensor]) -> None:
        super().__init__(source)
        self._map_ids = map_ids

    def __iter__(self) -> Iterator[Batch]:
        for block in self._source:
            yield replace(block, ids=self._map_ids(block.ids))

    def shard(self, index: int, count: int) -> MappedRows:
        return MappedRows(self._source.shard(index, count), self._map_ids)


def check_shard(index: int, count: int) -> None:
    """Raises ValueError unless `index` is in [0, count)."""
    if not 0 <= index < count:
        raise ValueError(f"expected a shard from 0 to before {count}, got {index}")


def numbered_names(word: str, count: int) -> tuple[str, ...]:
    """Returns `word_0`, `word_1` and so on."""
    return tuple(f"{word}_{number}" for number in range(count))


def _names(given: Sequence[str] | None, word: str, count: int) -> tuple[str, ...]:
    if given is None:
        return numbered_names(word, count)
    if len(given) != count:
        raise ValueError(f"expected {count} {word} names, got {len(given)}")
    return tuple(given)


class CachedRows(DerivedRows):
    """Keeps a source's rows in memory after the first whole pass if they need at most `max_bytes`.

    Rows that need more are read from the source in every pass. If the size of the first block shows that they will,
    nothing is kept, so that a single pass over many rows does not fill the memory first.
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
            # The estimate is asked once, at the first block: rows that will not fit are not kept until they overflow.
            if blocks is not None and free_bytes >= 0 and (blocks or self._will_fit(block)):
                blocks.append(block)
            else:
                blocks = None
            yield block
        # Only after a whole pass: one that was broken off has not all rows.
        self._blocks = blocks

    def shard(self, index: int, count: int) -> CachedRows:
        """Returns a part that keeps its own rows, in its part of the memory."""
        return CachedRows(self._source.shard(index, count), self._max_bytes // count)

    def _will_fit(self, first: Batch) -> bool:
        num_rows = self._source.estimated_rows
        return num_rows is None or num_rows * first.nbytes <= self._max_bytes * len(first)


class HeldOutRows(DerivedRows):
    """One part of a source split at random by row number: the validation rows, or all the others.

    A row's part depends only on `seed` and its number. So the two parts of one split are disjoint and complete in
    every pass, and do not depend on how they are cut into shards.
    """

    def __init__(
        self,
        source: RowSource,
        fraction: float,
        *,
        seed: int,
        part: Literal["training", "validation"],
    ) -> None:
        super().__init__(source)
        self._fraction = fraction
        self._seed = seed
        self._part: Literal["training", "validation"] = part
        self._shard = (0, 1)

    def __iter__(self) -> Iterator[Batch]:
        rng = np.random.default_rng(self._seed)
        index, count = self._shard
        for number, block in enumerate(self._source):
            # One draw a row: the stream of draws does not depend on how rows are cut into blocks.
            held_out = rng.random(len(block)) < self._fraction
            if number % count != index:
                continue
            chosen = torch.from_numpy(np.flatnonzero(held_out == (self._part == "validation")))
            if chosen.numel() > 0:
                yield block.take(chosen)

    @property
    def estimated_rows(self) -> int | None:
        total = self._source.estimated_rows
        share = self._fraction if self._part == "validation" else 1 - self._fraction
        return None if total is None else round(total * share / self._shard[1])

    @property
    def skipped(self) -> tuple[SkippedRows, ...]:
        # Every shard reads the whole source; one of them tells.
        return self._source.skipped if self._shard[0] == 0 else ()

    def shard(self, index: int, count: int) -> HeldOutRows:
        """Returns every `count`-th block from the `index`-th on; rows are numbered, so that all blocks are read."""
        check_shard(index, count)
        part = HeldOutRows(self._source, self._fraction, seed=self._seed, part=self._part)
        own_index, own_count = self._shard
        part._shard = (own_index + own_count * index, own_count * count)
        return part


class HashedRows(MappedRows):
    """The rows of a source with each id replaced by its bucket, `hash_ids(id, buckets)`.

    Raises:
        TypeError: `buckets` is no integer.
        ValueError: it is below one, or no int64.
    """

    def __init__(self, source: RowSource, buckets: int) -> None:
        buckets = as_int64("HashedRows", "buckets", buckets)
        if buckets < 1:
            raise ValueError(f"expected at least 1 bucket, got {buckets}")
        super().__init__(source, partial(hash_ids, buckets=buckets))
        self.unhashed = source


def hash_ids(ids: Tensor, buckets: int) -> Tensor:
    """Returns splitmix64(id) modulo `buckets` for each id, int64 [N], as unsigned numbers: int64 [N]."""
    return operators.bucket_ids(ids, buckets)
