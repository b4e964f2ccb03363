"""Rows split at random into training and validation rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from recstore_ops.training.rows.batch import Batch
from recstore_ops.training.rows.row_source import DerivedRows, RowSource, SkippedRows, check_shard


class HeldOutRows(DerivedRows):
    """One part of a source split at random by row number: the validation rows, or all the others.

    A row's part depends on `seed` and its number alone, so that the two parts of one split are
    disjoint and complete in every pass, and the same however each is cut into shards.
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
