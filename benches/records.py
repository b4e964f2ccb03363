"""The raw figures of a run as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benches.measured import Figure, Outcome, Timed


def start(path: Path, machine: Mapping[str, str], is_full: bool) -> None:
    """Begins a file with what was measured on; replaces one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": dict(machine), "full": is_full}) + "\n", encoding="utf-8")


def append(path: Path, outcome: Outcome) -> None:
    """Adds a line for each competitor, figure or error."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in _lines(outcome))


def _lines(outcome: Outcome) -> Iterator[dict[str, Any]]:
    if isinstance(outcome, Figure):
        yield vars(outcome)
        return
    if outcome.error:
        yield {"cell": outcome.cell, "axes": dict(outcome.axes), "error": outcome.error}
    for name in outcome.nanoseconds:
        yield from _competitor(outcome, name)


def _competitor(timed: Timed, name: str) -> Iterator[dict[str, Any]]:
    spread = timed.spread(name)
    if spread is None:
        return
    ratios = {base: timed.ratio(name, base) for base in timed.against.get(name, ())}
    yield {
        "cell": timed.cell,
        "axes": dict(timed.axes),
        "competitor": name,
        "nanoseconds": vars(spread),
        "ratios": {base: vars(ratio) if ratio else None for base, ratio in ratios.items()},
        "rounds": timed.nanoseconds[name],
    }
