"""A table with admission and eviction as one would write it down: dicts, and sorting."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Row = tuple[float, ...]

INITIAL = 0.25


@dataclass
class Usage:
    step: int
    count: int


@dataclass
class Sweep:
    began: int
    leaves: int
    chosen: set[int]


@dataclass
class LifecycleModel:
    """A table of SGD with learning rate 1, whose rows start at `INITIAL`."""

    dim: int
    admission: dict[str, Any] | None
    eviction: dict[str, Any] | None
    step: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    sweep: Sweep | None = None
    evictions: int = 0
    rejections: int = 0

    def update(self, batch: list[tuple[int, float]]) -> None:
        """Takes a step; every element of an id's gradients is the value that comes with it."""
        before, self.step = self.step, self.step + 1
        sums: dict[int, float] = {}
        for id, value in batch:
            sums[id] = sums.get(id, 0.0) + value
        for id in sorted(sums):
            if id not in self.rows and not self._admits(id):
                self.rejections += 1
                continue
            row = self.rows.get(id, (INITIAL,) * self.dim)
            self.rows[id] = tuple(weight - sums[id] for weight in row)
            used = self.usage.get(id, Usage(0, 0))
            self.usage[id] = Usage(self._stamp(self.step), used.count + 1)
        if self.sweep is not None and self.sweep.leaves <= self.step:
            self._leave(self.sweep)
        self._age_counts()
        self._begin_sweep(before)

    def write(self, batch: list[tuple[int, float]]) -> None:
        for id, value in batch:
            self._make(id)
            self.rows[id] = (value,) * self.dim
            self.usage[id].step = self._stamp(self.step + 1)

    def insert(self, ids: list[int]) -> None:
        for id in ids:
            if id not in self.rows:
                self._make(id)

    def delete(self, ids: list[int]) -> None:
        for id in ids:
            self.rows.pop(id, None)
            self.usage.pop(id, None)
            self._forget(id)

    def clear(self) -> None:
        self.rows, self.usage, self.counts, self.sweep = {}, {}, {}, None

    def would_leave(self) -> list[int]:
        return sorted(self._choose() - set((self.eviction or {}).get("keep", ())))

    def evict(self) -> list[int]:
        leaving = self.would_leave()
        self._take(leaving)
        return leaving

    def candidates(self) -> int:
        return len(self.counts) if self.admission and self.admission["kind"] == "count" else 0

    def _make(self, id: int) -> None:
        if id not in self.rows:
            self.rows[id] = (INITIAL,) * self.dim
            self.usage[id] = Usage(self._stamp(self.step + 1), 0)
            self._forget(id)

    def _admits(self, id: int) -> bool:
        if self.admission is None:
            return True
        if self.admission["kind"] == "probability":
            return self.admission["probability"] == 1
        self.counts[id] = self.counts.get(id, 0) + 1
        is_admitted = self.counts[id] >= self.admission["threshold"]
        if is_admitted:
            self._forget(id)
        return is_admitted

    def _age_counts(self) -> None:
        every = (self.admission or {}).get("halve_every")
        if every is not None and self.step % every == 0:
            self.counts = {id: count // 2 for id, count in self.counts.items() if count > 1}

    def _forget(self, id: int) -> None:
        # Ids cannot be told apart in a sketch.
        if self.admission is not None and self.admission["kind"] == "count":
            self.counts.pop(id, None)

    def _stamp(self, step: int) -> int:
        return max(step, self.sweep.began + 1 if self.sweep else 0)

    def _begin_sweep(self, before: int) -> None:
        if self.eviction is None or self.sweep is not None:
            return
        interval = self.eviction["interval"]
        if self.step // interval > before // interval:
            delay = self.eviction.get("delay", max(interval // 10, 1))
            self.sweep = Sweep(self.step, self.step + delay, self._choose())

    def _choose(self) -> set[int]:
        eviction = self.eviction or {}
        chosen = {id for id, used in self.usage.items() if self.step - used.step > eviction.get("ttl", math.inf)}
        least = eviction.get("min_norm", 0.0)
        chosen |= {id for id, row in self.rows.items() if math.sqrt(sum(value * value for value in row)) < least}
        excess = len(self.rows) - eviction.get("capacity", len(self.rows))
        is_lfu = eviction.get("policy") == "lfu"

        def rank(id: int) -> tuple[int, int, int]:
            used = self.usage[id]
            return (used.count, used.step, id) if is_lfu else (used.step, used.count, id)

        return chosen | set(sorted(self.rows, key=rank)[: max(excess, 0)])

    def _leave(self, sweep: Sweep) -> None:
        self.sweep = None
        keep = (self.eviction or {}).get("keep", ())
        untouched = [id for id in sweep.chosen if id in self.rows and self.usage[id].step <= sweep.began]
        self._take([id for id in untouched if id not in keep])

    def _take(self, ids: list[int]) -> None:
        for id in ids:
            del self.rows[id], self.usage[id]
        self.evictions += len(ids)
