"""Whose row an id is, where several processes share a table: the same rule on ranks and in checkpoints."""

import numpy as np
import torch
from torch import Tensor

from recstore_ops.table.splitmix64 import splitmix64


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
