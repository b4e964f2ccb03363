"""`Shard`: which part of its tables a process has, and how it talks with those that have the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from recstore_ops.config.table_options import DEFAULTS, GradReduce, TableOptions
from recstore_ops.table.shard_of import shard_of


class JoinNotifier:
    """Whether what a group exchanges just now was announced to the ranks that have no more batches.

    Args:
        group: the ranks once more, over which their tables exchange meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._is_announced = False

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Within it exchanges are what was announced."""
        self._is_announced = True
        try:
            yield
        finally:
            self._is_announced = False

    def check(self) -> None:
        """Refuses an exchange that ranks without batches would not take part in.

        Raises:
            RuntimeError: it was not announced.
        """
        if not self._is_announced:
            raise RuntimeError(
                "within sharding.join sharded tables take lookups, backward passes and steps only, for ranks without "
                "batches take part in these; clip, scale, open, save and load before or after it"
            )


joinings: dict[dist.ProcessGroup, JoinNotifier] = {}
"""By the group of the tables."""


_WIRE_TYPES = (torch.float32, torch.bfloat16)

_FAILED = -1
"""Stands for the fingerprint of a rank that could not open its table; no fingerprint is negative."""


@dataclass(frozen=True)
class Shard:
    """The part that this process has of tables which the processes of a group share.

    Attributes:
        group: the processes.
        rank: the number of this one among them.
        world: how many they are.
        grad_reduce: whether gradients are summed over the ranks, or divided by their number besides.
        wire_dtype: the type in which rows and gradients travel.
    """

    group: dist.ProcessGroup
    rank: int
    world: int
    grad_reduce: GradReduce
    wire_dtype: torch.dtype

    @classmethod
    def of(cls, options: TableOptions) -> Shard | None:
        """The shard of this process in the `process_group` of a table's options; `None` without one.

        Raises:
            ValueError: another `grad_reduce` or `wire_dtype`, either of them without a group, or a group that this
                process is no part of.
        """
        chosen: dict[str, Any] = {**DEFAULTS, **options}
        group, grad_reduce, wire_dtype = chosen.get("process_group"), chosen["grad_reduce"], chosen.get("wire_dtype")
        if grad_reduce not in get_args(GradReduce):
            raise ValueError(f'grad_reduce must be "mean" or "sum", got {grad_reduce!r}')
        if wire_dtype not in (None, *_WIRE_TYPES):
            raise ValueError(f"wire_dtype must be torch.float32 or torch.bfloat16, got {wire_dtype}")
        if group is None:
            if grad_reduce != "mean" or wire_dtype is not None:
                raise ValueError("grad_reduce and wire_dtype are about the ranks of a process_group, and there is none")
            return None
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is no part of the process_group of its table")
        return cls(group, rank, dist.get_world_size(group), grad_reduce, wire_dtype or torch.float32)

    @property
    def is_alone(self) -> bool:
        """Whether the group has this process only, which then has all rows and exchanges nothing."""
        return self.world == 1

    @property
    def device(self) -> torch.device:
        """The device of tensors to send: the CPU for gloo, the current GPU for nccl."""
        return torch.device("cpu") if "gloo" in dist.get_backend(self.group) else torch.device("cuda")

    def owns(self, ids: Tensor) -> Tensor:
        """Whether each id belongs to this shard: bool, in the shape of `ids` (int64), on the CPU."""
        return shard_of(ids, self.world) == self.rank

    @property
    def _way(self) -> dist.ProcessGroup:
        """The group that exchanges go over: within `sharding.join` one of its own."""
        joining = joinings.get(self.group) if joinings else None
        if joining is None:
            return self.group
        joining.check()
        return joining.group

    def all_to_all(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        """Sends a part of a tensor to each rank and returns what came from each, one after the other.

        Args:
            sent: uint8, `[sum of sent_sizes]`.
            sent_sizes: bytes for each rank.
            received_sizes: bytes of each rank.

        Returns:
            uint8, `[sum of received_sizes]`, on the CPU.
        """
        received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(received, sent.to(self.device), received_sizes, sent_sizes, group=self._way)
        return received.cpu()

    def gathered(self, number: int) -> list[int]:
        """The number that each rank gives."""
        own = torch.tensor([number], dtype=torch.int64, device=self.device)
        numbers = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(numbers, own, group=self._way)
        return [int(each) for each in numbers]

    def ranks_where(self, is_so: bool) -> list[int]:
        """The ranks that call this with `True`; all of them call it."""
        return [rank for rank, number in enumerate(self.gathered(int(is_so))) if number]

    def reduced(self, value: Tensor, operation: Any) -> Tensor:
        """A tensor reduced over the ranks, by an operation of `dist.ReduceOp`; on the device it came from."""
        # `all_reduce` works in place, and the value belongs to the caller.
        reduced = value.to(self.device, copy=True)
        dist.all_reduce(reduced, operation, group=self._way)
        return reduced.to(value.device)

    def agree(self, name: str, description: str) -> None:
        """Checks that all ranks open the same table with the same configuration.

        Raises:
            ValueError: they do not.
            RuntimeError: another rank could not open its table.
        """
        digest = hashlib.sha256(f"{name}\0{description}\0{self.grad_reduce}\0{self.wire_dtype}".encode()).digest()
        # Seven bytes of it: as an int64 the number is never negative, as `_FAILED` is.
        own = int.from_bytes(digest[:7], "big")
        fingerprints = self.told(name, own)
        others = [rank for rank, each in enumerate(fingerprints) if each != own]
        if others:
            raise ValueError(
                f'table "{name}": rank {others[0]} opens a table of another name or configuration than rank '
                f"{self.rank}; all ranks must make the same modules in the same order"
            )

    def told(self, name: str, number: int) -> list[int]:
        """The number, from 0 on, that each rank gives while it opens a table.

        Raises:
            RuntimeError: another rank could not open its table.
        """
        numbers = self.gathered(number)
        failed = [rank for rank, each in enumerate(numbers) if each == _FAILED]
        if failed:
            raise RuntimeError(f'table "{name}": rank {failed[0]} could not open its table; its own error tells why')
        return numbers

    def disagree(self) -> None:
        """Signals the other ranks, which are in `agree`, that this one could not open its table."""
        self.gathered(_FAILED)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a table sharded over a process_group cannot be pickled: a group belongs to its process; "
            "make the module anew in every process, and bring its rows there by recstore_ops.sharding.save and load"
        )
