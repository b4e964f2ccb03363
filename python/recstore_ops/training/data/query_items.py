"""The two sides of a row for retrieval: the fields of its item, and all others with the dense features, its query.

Shapes: B rows, F fields, N ids of all rows together, J dense features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recstore_ops.table.shard_of import splitmix64
from recstore_ops.training.data.batch import Batch, offsets_of_lengths

_BITS_OF_ONE = np.uint64(0x3F800000)
_VALUE_FACTOR = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class QueryItemSplit:
    """Cuts rows into their sides.

    Attributes:
        num_fields: F.
        items: the numbers of the item's fields.

    Raises:
        ValueError: there is no field for one of the sides, a field that is not there, or one twice.
    """

    num_fields: int
    items: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in self.items:
            if not 0 <= field < self.num_fields:
                raise ValueError(f"an item needs some of the {self.num_fields} fields, got {field}")
        if not 0 < len(set(self.items)) < self.num_fields or len(set(self.items)) < len(self.items):
            raise ValueError(
                f"items need at least one of the {self.num_fields} fields and leave at least one for queries, each "
                f"named once, got {list(self.items)}"
            )

    @property
    def queries(self) -> tuple[int, ...]:
        """The numbers of the query's fields."""
        return tuple(field for field in range(self.num_fields) if field not in self.items)

    def item(self, batch: Batch) -> Batch:
        """Returns the rows with the item's fields only; those that have no others stay as they are.

        Raises:
            ValueError: the rows have another number of fields.
        """
        return self._side(replace(batch, dense=None), self.items)

    def query(self, batch: Batch) -> Batch:
        """Returns the rows with the query's fields only; those that have no others stay as they are.

        Raises:
            ValueError: the rows have another number of fields.
        """
        return self._side(batch, self.queries)

    def _side(self, batch: Batch, fields: Sequence[int]) -> Batch:
        if batch.num_fields == len(fields):
            return batch
        if batch.num_fields != self.num_fields:
            raise ValueError(f"expected rows of {self.num_fields} or {len(fields)} fields, got {batch.num_fields}")
        return select_fields(batch, fields)


def select_fields(batch: Batch, fields: Sequence[int]) -> Batch:
    """Returns the same rows with some of their fields only, numbered in the order of `fields`."""
    chosen = torch.tensor(fields, dtype=torch.int64, device=batch.ids.device)
    if batch.offsets is None:
        return replace(
            batch,
            ids=_chosen(batch.ids, batch.num_fields, chosen),
            num_fields=len(fields),
            values=None if batch.values is None else _chosen(batch.values, batch.num_fields, chosen),
        )
    offsets = batch.offsets
    starts, lengths = (
        bags.view(-1, batch.num_fields)[:, chosen].reshape(-1) for bags in (offsets[:-1], offsets.diff())
    )
    new_offsets = offsets_of_lengths(lengths)
    shift_N = torch.repeat_interleave(starts - new_offsets[:-1], lengths)
    place_N = shift_N + torch.arange(shift_N.shape[0], dtype=torch.int64, device=offsets.device)
    return replace(
        batch,
        ids=batch.ids[place_N],
        num_fields=len(fields),
        offsets=new_offsets,
        values=None if batch.values is None else batch.values[place_N],
    )


def _chosen(values_N: Tensor, num_fields: int, chosen: Tensor) -> Tensor:
    return values_N.view(-1, num_fields)[:, chosen].reshape(-1)


def row_keys(batch: Batch) -> Tensor:
    """Returns a number for each row, equal for rows of equal features, int64 [B].

    Features are the ids and values of each field, in any order, and the dense features. Rows of one id in one field
    without values have different numbers if their ids differ. Others share one with a probability of 2^-64.
    """
    offsets = batch.offsets_or_ones().numpy()
    field_N = np.repeat(np.tile(np.arange(batch.num_fields), len(batch)), np.diff(offsets))
    hashes_N = splitmix64(batch.ids.numpy() ^ _salts(batch.num_fields, 0)[field_N])
    if batch.values is not None:
        hashes_N += (_bits(batch.values) - _BITS_OF_ONE) * _VALUE_FACTOR
    # Numbers of 64 bits without a sign wrap around: differences of their running sums are exact.
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), hashes_N.cumsum(dtype=np.uint64)])
    keys_B = np.diff(sums[offsets[:: batch.num_fields]])
    if batch.dense is not None:
        salts_J = _salts(batch.dense.shape[1], batch.num_fields).view(np.uint64)
        keys_B = keys_B + splitmix64((_bits(batch.dense) ^ salts_J).view(np.int64)).sum(1, dtype=np.uint64)
    return torch.from_numpy(keys_B.view(np.int64))


def first_of_each(keys_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the C distinct keys as they come, the first place of each, and which one each key is.

    All are int64: [C], [C] and [B].
    """
    keys_C, which_B = keys_B.unique(return_inverse=True)
    places_B = torch.arange(keys_B.numel(), dtype=torch.int64, device=keys_B.device)
    first_C, order_C = torch.full_like(keys_C, keys_B.numel()).scatter_reduce_(0, which_B, places_B, "amin").sort()
    return keys_C[order_C], first_C, order_C.argsort()[which_B]


def _salts(count: int, start: int) -> NDArray[np.int64]:
    return splitmix64(np.arange(start, start + count)).view(np.int64)


def _bits(values: Tensor) -> NDArray[np.uint64]:
    return values.contiguous().float().numpy().view(np.uint32).astype(np.uint64)
