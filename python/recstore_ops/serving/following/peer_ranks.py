"""How the first of several processes, whose tables are sharded over them, has the others do their part of publishing.

The program calls the same methods on all processes. Within each method the first process sends requests, and the
others carry them out until it reports how the method ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from recstore_ops.sharding.collective import Collective
from recstore_ops.table.shard import joinings

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Command:
    """A request to the other processes."""

    what: str
    argument: Any


@dataclass(frozen=True)
class Outcome:
    """How a method ended on the first process.

    Attributes:
        result: whether it published.
        number, bytes_written, address: of `Publisher`.
        due: the step after which the first process looks next whether an update is due.
    """

    result: bool
    number: int
    bytes_written: int
    address: str | None
    due: int


@dataclass(frozen=True)
class Failed:
    """Why a method, or a part of it, could not be done."""

    problem: str


class PeerRanks(Protocol):
    """The processes beside this one that have rows of the tables.

    Attributes:
        writing: all of them, to write bases together.
    """

    writing: Collective

    def ask(self, what: str, argument: Any, own: Callable[[], _Result]) -> list[_Result]:
        """Has each process carry out a request, this one by `own`, and returns the results of all.

        Raises:
            RuntimeError: one could not.
        """
        ...

    def together(self, work: Callable[[], _Result], told: Callable[[_Result], Outcome]) -> _Result:
        """Does the work of a method, and reports to the others how it ended."""
        ...


class SingleProcess:
    """This process has all rows, or servers have them."""

    def __init__(self) -> None:
        self.writing = Collective()

    def ask(self, what: str, argument: Any, own: Callable[[], _Result]) -> list[_Result]:
        """See `PeerRanks`."""
        return [own()]

    def together(self, work: Callable[[], _Result], told: Callable[[_Result], Outcome]) -> _Result:
        """See `PeerRanks`."""
        return work()


class OtherRanks:
    """The other processes of a group, to the first one; and the first one, to the others.

    Args:
        group: the processes.
        second_group: the same once more, so that bases are written beside the training.
    """

    def __init__(self, group: dist.ProcessGroup, second_group: dist.ProcessGroup) -> None:
        # Two groups: a thread exchanges a base over the second while the methods of the program use the first.
        self._asking, self.writing = Collective(group), Collective(second_group)

    @property
    def is_first(self) -> bool:
        """Whether this process asks."""
        return self._asking.is_first

    def ask(self, what: str, argument: Any, own: Callable[[], _Result]) -> list[_Result]:
        """See `PeerRanks`."""
        self._say(Command(what, argument))
        # An error here waits until the answers are in: the others send theirs in any case.
        answer = _outcome(own)
        answers: list[Any] = [None] * self._asking.world
        dist.gather_object(None, answers, group=self._asking.group, group_dst=0)
        if isinstance(answer, Exception):
            raise answer
        answers[0] = answer
        for rank, other in enumerate(answers):
            if isinstance(other, Failed):
                raise RuntimeError(f"rank {rank}: {other.problem}")
        return answers

    def together(self, work: Callable[[], _Result], told: Callable[[_Result], Outcome]) -> _Result:
        """See `PeerRanks`."""
        self._check_not_joined()
        try:
            result = work()
            said = told(result)
        except Exception as error:
            # Before the error goes on: the other processes wait in `obey` until this one reports an end.
            self._say(Failed(str(error)))
            raise
        self._say(said)
        return result

    def obey(self, do: Callable[[Command], Any]) -> Outcome:
        """Carries out the requests of the first process until it reports how the method ended.

        Raises:
            RuntimeError: it failed, or ranks may have no batches.
        """
        self._check_not_joined()
        while True:
            said: list[Any] = [None]
            dist.broadcast_object_list(said, group=self._asking.group, group_src=0)
            if isinstance(said[0], Failed):
                raise RuntimeError(f"rank 0 could not publish: {said[0].problem}")
            if isinstance(said[0], Outcome):
                return said[0]
            answer = _outcome(lambda asked=said[0]: do(asked))
            told = Failed(str(answer)) if isinstance(answer, Exception) else answer
            dist.gather_object(told, None, group=self._asking.group, group_dst=0)

    def _check_not_joined(self) -> None:
        if self._asking.group in joinings:
            raise RuntimeError("a publisher is not announced to ranks without batches: use it outside of sharding.join")

    def _say(self, said: Command | Outcome | Failed) -> None:
        dist.broadcast_object_list([said], group=self._asking.group, group_src=0)


def _outcome(work: Callable[[], _Result]) -> _Result | Exception:
    try:
        return work()
    except Exception as error:
        return error
