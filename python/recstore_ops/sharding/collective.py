"""Joint work of the processes of a group: it succeeds on all of them, or raises on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_Result = TypeVar("_Result")


class Collective:
    """The processes that do something together; without a group this one alone.

    Attributes:
        group: the processes; None if this one is alone.
        rank: its number.
        world: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that does what only one does."""
        return self.rank == 0

    def of_first(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Returns the result of the first process's work on all processes. The others do no work.

        Raises:
            RuntimeError: it failed; on the first process its own error.
        """
        if self.group is None:
            return work()
        results: list[Any] = [None, None]
        if self.is_first:
            try:
                results[0] = work()
            except Exception as error:
                # The others wait for the result. They get the reason in its place.
                dist.broadcast_object_list([None, str(error)], group=self.group, group_src=0)
                raise
        dist.broadcast_object_list(results, group=self.group, group_src=0)
        if results[1] is not None:
            raise RuntimeError(f"rank 0 could not {what}: {results[1]}")
        return results[0]

    def check_same(self, call: str, **arguments: Any) -> None:
        """Checks that all processes gave a call the same arguments; those that only some give are not compared.

        Raises:
            ValueError: they did not; on all.
        """
        if self.group is None:
            return
        given: list[Any] = [None] * self.world
        dist.all_gather_object(given, arguments, group=self.group)
        for rank, others in enumerate(given):
            for name in given[0].keys() & others.keys():
                if others[name] != given[0][name]:
                    raise ValueError(
                        f"{call}: all ranks give the same {name}, and rank 0 gives {given[0][name]!r}, rank {rank} "
                        f"{others[name]!r}"
                    )

    def all_or_none(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Does this process's work.

        Raises:
            RuntimeError: another process could not do its own.
            Exception: that of this one's work.
        """
        if self.group is None:
            return work()
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        # A process that failed takes part all the same: the others wait in this gathering.
        messages: list[Any] = [None] * self.world
        dist.all_gather_object(messages, None if failure is None else str(failure), group=self.group)
        if failure is not None:
            raise failure
        failed = [rank for rank, message in enumerate(messages) if message is not None]
        if failed:
            raise RuntimeError(f"rank {failed[0]} could not {what}: {messages[failed[0]]}")
        return result
