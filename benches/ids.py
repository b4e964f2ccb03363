"""Batches of ids, made before anything is timed.

An index is a row number in `[0, rows)`, what tables of a fixed size take. Its id, what the store takes, stands for the
same row. `dense` ids are the row numbers themselves, `spread` ids any int64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

Distribution = Literal["uniform", "zipf", "zipf 0.8", "zipf 1.2"]

IdKind = Literal["dense", "dense in random order", "spread"]
"""Row numbers, whose rows were made in their order or in a random one; or ids spread over all 64 bits."""
DENSE: IdKind = "dense"
IN_RANDOM_ORDER: IdKind = "dense in random order"
SPREAD: IdKind = "spread"
KINDS = (DENSE, SPREAD)
"""The kinds that most cells measure."""

EXPONENTS: dict[Distribution, float] = {"zipf": 1.05, "zipf 0.8": 0.8, "zipf 1.2": 1.2}
"""By which the frequency of a row falls with its rank."""
_IDS_IN_ALL, _FEWEST_BATCHES, _MAX_BATCHES = 1_048_576, 4, 1024


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        index: int64, `[N]`: row numbers.
        ids: int64, `[N]`: their ids.
        distinct: int64, `[U]`: the distinct row numbers, in the order in which they first come.
    """

    index: Tensor
    ids: Tensor
    distinct: Tensor

    @classmethod
    def of(cls, index: Tensor, kind: IdKind = SPREAD) -> Batch:
        """Completes row numbers to a batch."""
        return cls(index, ids_of(index, kind), in_order_of_arrival(index))


@dataclass(frozen=True)
class Grouped:
    """The positions of a batch, grouped by row; rows come in the order in which they first come in the batch.

    Attributes:
        order: int64, `[N]`: positions, those of one row side by side and ascending.
        starts: int64, `[U + 1]`: where the positions of each distinct row begin, and the end of the last.
    """

    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, index: Tensor) -> Grouped:
        """Groups the positions of row numbers."""
        _, firsts, inverse, counts = np.unique(
            index.numpy(), return_index=True, return_inverse=True, return_counts=True
        )
        arrival = np.argsort(firsts)
        place = np.empty_like(arrival)
        place[arrival] = np.arange(len(arrival))
        order = np.argsort(place[inverse], kind="stable")
        starts = np.concatenate([[0], np.cumsum(counts[arrival])])
        return cls(torch.from_numpy(order), torch.from_numpy(starts))


def ids_of(index: Tensor, kind: IdKind = SPREAD) -> Tensor:
    """Returns the id of each row number, in memory of its own: distinct ids for distinct numbers.

    Spread ids come from the finalizer of splitmix64, a bijection. Steele, Lea, Flood, OOPSLA 2014.
    """
    if kind != SPREAD:
        return index.clone()
    z = index.numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((z ^ (z >> np.uint64(31))).view(np.int64))


def in_order_of_arrival(index: Tensor) -> Tensor:
    """Returns the distinct row numbers as they first come, so that reading them is no sequential pass."""
    distinct, firsts = np.unique(index.numpy(), return_index=True)
    return torch.from_numpy(distinct[np.argsort(firsts)])


def batches(rows: int, size: int, distribution: Distribution, seed: int = 0, *, kind: IdKind = SPREAD) -> list[Batch]:
    """Returns different batches of `size` ids each, enough of them that no cache remembers the last turn."""
    count = max(_FEWEST_BATCHES, min(_MAX_BATCHES, _IDS_IN_ALL // size))
    return [Batch.of(index, kind) for index in draw(rows, size * count, distribution, seed).split(size)]


def turn_of(batches: Sequence[T]) -> Callable[[int], T]:
    """Returns what gives each turn its batch, in rotation."""
    return lambda turn: batches[turn % len(batches)]


def draw(rows: int, count: int, distribution: Distribution, seed: int) -> Tensor:
    """Draws row numbers, int64 `[count]`."""
    generator = np.random.default_rng(seed)
    if distribution == "uniform":
        return torch.from_numpy(generator.integers(rows, size=count))
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENTS[distribution]
    ranks = np.searchsorted(np.cumsum(weights), generator.random(count) * weights.sum())
    places = generator.permutation(rows)  # Frequent rows do not lie side by side.
    return torch.from_numpy(places[np.minimum(ranks, rows - 1)])


def missing(rows: int, size: int, seed: int = 1, *, kind: IdKind = SPREAD) -> list[Tensor]:
    """Returns ids without a row, int64 `[size]` each."""
    return [ids_of(batch.index + rows, kind) for batch in batches(rows, size, "uniform", seed)]


def all_ids(rows: int, chunk: int, kind: IdKind = SPREAD) -> Iterator[Tensor]:
    """Gives the ids of all rows once, in the order in which rows are made: int64 `[chunk]` and a last shorter part."""
    order = np.random.default_rng(0).permutation(rows) if kind == IN_RANDOM_ORDER else None
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        yield ids_of(torch.arange(start, stop) if order is None else torch.from_numpy(order[start:stop]), kind)


def with_duplicates(count: int, share: float, seed: int = 0) -> Tensor:
    """Returns ids `[count]` in random order of which that share repeats another one."""
    generator = np.random.default_rng(seed)
    distinct = round(count * (1 - share))
    repeated = generator.integers(distinct, size=count - distinct)
    index = np.concatenate([np.arange(distinct), repeated])
    return ids_of(torch.from_numpy(generator.permutation(index)))
