"""What is measured: cases of competing programs, and single figures; and what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from benches.spread import Spread, ratios

Axis = int | str
OutputState = Literal["cold", "hot", "as it is"]


@dataclass(frozen=True)
class Plan:
    """How long a case is measured: that many rounds, or fewer where they take longer than that many seconds."""

    rounds: int
    seconds: float
    fewest_rounds: int = 5


@dataclass(frozen=True)
class Competitor:
    """A program that is timed beside others.

    Attributes:
        name: who it is.
        call: does it once, on batch number `round`; what it returns is kept until after the clock was read.
        against: whose time its own is divided by: one, several or none.
        output: shape and dtype of what it writes, whose memory is put into the case's state first.
    """

    name: str
    call: Callable[[int], object]
    against: str | tuple[str, ...] | None = None
    output: tuple[tuple[int, ...], torch.dtype] | None = None

    @property
    def bases(self) -> tuple[str, ...]:
        """All whose time its own is divided by."""
        return (self.against,) if isinstance(self.against, str) else self.against or ()


@dataclass(frozen=True)
class Case:
    """Competitors that do the same.

    Attributes:
        cell: the group, one table of the report.
        axes: what tells this case from others of its group.
        competitors: who is timed, in this order, once a round.
        plan: how long.
        output: the state of the output's memory before each call.
        threads: torch's, which all competitors follow.
        calls: calls in one timing; times are per call.
        operations: what one call does so many times; times are per operation.
        read_first: tensors that are read before each call, as if just made: gradients.
        absent: who is not installed: their columns stay empty.
    """

    cell: str
    axes: Mapping[str, Axis]
    competitors: Sequence[Competitor]
    plan: Plan
    output: OutputState = "cold"
    threads: int = 2
    calls: int = 1
    operations: int = 1
    read_first: Sequence[torch.Tensor] = ()
    absent: Sequence[str] = ()


@dataclass
class Timed:
    """What came out of a case.

    Attributes:
        nanoseconds: of each competitor, one value a round.
        against: whose time each competitor's is divided by.
        error: what ended the case early.
    """

    cell: str
    axes: Mapping[str, Axis]
    nanoseconds: dict[str, list[float]] = field(default_factory=dict)
    against: dict[str, tuple[str, ...]] = field(default_factory=dict)
    error: str | None = None

    def spread(self, name: str) -> Spread | None:
        """Nanoseconds a call; None for who was not there."""
        values = self.nanoseconds.get(name)
        return Spread.of(values) if values else None

    def ratio(self, name: str, base: str) -> Spread | None:
        """How many times `base`'s time it takes, by rounds; None where one of the two was not there."""
        values, others = self.nanoseconds.get(name), self.nanoseconds.get(base)
        return Spread.of(ratios(values, others)) if values and others else None


@dataclass(frozen=True)
class Figure:
    """A single figure that was not made by rounds.

    Attributes:
        limit: what it should keep to, such as `<= 1.2`; empty for none.
    """

    cell: str
    name: str
    value: float
    unit: str
    limit: str = ""


Outcome = Timed | Figure
