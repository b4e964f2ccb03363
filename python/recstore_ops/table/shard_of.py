"""The rule for which process has an id's row if several share a table: the same on ranks and in checkpoints."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The finalizer of splitmix64: a bijection of 64 bits that spreads near numbers over all of them.
#
# Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of variant 13 of
# Stafford.

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def splitmix64(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the first output of splitmix64 for each number (any shape, contiguous) as its state."""
    z = numbers.view(np.uint64) + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _FIRST_FACTOR
    z = (z ^ (z >> np.uint64(27))) * _SECOND_FACTOR
    return z ^ (z >> np.uint64(31))


def shard_of(ids: Tensor, num_shards: int) -> Tensor:
    """The shard that each id belongs to: splitmix64 of the id, modulo the number of shards.

    It is the same on every machine and in every release. `load(path, shard=(number, num_shards))` loads the rows of the
    ids of shard `number`. A save does not ask for it: processes may have split their rows in another way.

    Args:
        ids: int64, of any shape.
        num_shards: how many there are.

    Returns:
        int64 in `[0, num_shards)`, in the shape of `ids`, on the CPU.

    Raises:
        TypeError: ids of another type.
        ValueError: `num_shards` is not positive.

    Examples:
        >>> shard_of(torch.tensor([0, 1, 2, -1]), 3)
        tensor([1, 2, 1, 2])
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be a tensor, got {type(ids).__name__}")
    if ids.dtype != torch.int64:
        raise TypeError(f"ids must be of torch.int64, got {ids.dtype}")
    check_shard(0, num_shards)
    hashes = splitmix64(ids.detach().cpu().reshape(-1).contiguous().numpy())
    shards = (hashes % np.uint64(num_shards)).astype(np.int64)
    return torch.from_numpy(shards).reshape(ids.shape)


def check_shard(number: int, of: int) -> tuple[int, int]:
    """Checks that `number` is one of `of` shards, and returns both.

    Raises:
        ValueError: it is not.
    """
    if type(number) is not int or type(of) is not int or not 0 <= number < of:
        raise ValueError(f"a shard is a number from 0 on below the number of shards, got {number!r} of {of!r}")
    return number, of
