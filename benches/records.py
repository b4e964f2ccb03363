"""The raw figures of a run as JSON lines; a run that broke off goes on from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benches.measured import Figure, Outcome, Timed

_OF_EACH_DAY = ("date",)


def start(path: Path, machine: Mapping[str, str], is_full: bool) -> None:
    """Begins a file with what was measured on; replaces one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": dict(machine), "full": is_full}) + "\n", encoding="utf-8")


def start_stage(path: Path, stage: str) -> None:
    """Says that the lines from here are of a stage."""
    _write(path, [{"stage": stage}])


def finish_stage(path: Path, stage: str) -> None:
    """Says that a stage has all its lines."""
    _write(path, [{"finished": stage}])


def append(path: Path, outcome: Outcome) -> None:
    """Adds a line for each competitor, figure or error."""
    _write(path, _lines(outcome))


def _write(path: Path, lines: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _lines(outcome: Outcome) -> Iterator[dict[str, Any]]:
    if isinstance(outcome, Figure):
        yield vars(outcome)
        return
    if outcome.error:
        yield {"cell": outcome.cell, "axes": dict(outcome.axes), "error": outcome.error}
    for name in outcome.nanoseconds:
        yield _competitor(outcome, name)


def _competitor(timed: Timed, name: str) -> dict[str, Any]:
    spread = timed.spread(name)
    line = {"cell": timed.cell, "axes": dict(timed.axes)}
    if spread is None:
        return {**line, "absent": name}
    ratios = {base: timed.ratio(name, base) for base in timed.against.get(name, ())}
    return {
        **line,
        "competitor": name,
        "nanoseconds": vars(spread),
        "ratios": {base: vars(ratio) if ratio else None for base, ratio in ratios.items()},
        "rounds": timed.nanoseconds[name],
    }


def finished(path: Path, machine: Mapping[str, str], is_full: bool) -> dict[str, list[Outcome]]:
    """What came out of each stage that was finished without an error.

    Raises:
        ValueError: the file is no run's, or the run is of another commit, machine or scale.
    """
    lines = _read(path)
    head = next(lines, {})
    if "machine" not in head:
        raise ValueError(f"{path} has no figures of a run")
    expected = {"full": str(is_full), **machine}
    actual = {"full": str(head.get("full")), **head["machine"]}
    for name in expected:
        if name not in _OF_EACH_DAY and actual.get(name) != expected[name]:
            raise ValueError(f"{path} was measured with {name} {actual.get(name)}, this run has {expected[name]}")
    stages: dict[str, list[Outcome]] = {}
    lines_of_stage: list[dict[str, Any]] = []
    for line in lines:
        if "stage" in line:
            lines_of_stage = []
        elif "finished" in line:
            stages[line["finished"]] = list(_outcomes(lines_of_stage))
        else:
            lines_of_stage.append(line)
    return stages


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Lines up to one that was not written to its end."""
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            return


def _outcomes(lines: list[dict[str, Any]]) -> Iterator[Outcome]:
    timed: dict[str, Timed] = {}
    outcomes: list[Outcome] = []
    for line in lines:
        if "axes" not in line:
            outcomes.append(Figure(**line))
            continue
        key = json.dumps([line["cell"], line["axes"]])
        if key not in timed:
            timed[key] = Timed(line["cell"], line["axes"])
            outcomes.append(timed[key])
        name = line["absent"] if "absent" in line else line["competitor"]
        timed[key].nanoseconds[name] = line.get("rounds", [])
        if line.get("ratios"):
            timed[key].against[name] = tuple(line["ratios"])
    yield from outcomes
