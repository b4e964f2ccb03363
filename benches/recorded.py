"""The figures that the tables of README.md show."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).with_name("README.md")
_UNITS = {"": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def recorded(heading: str, column: str, *starts: str, of: str | None = None) -> float:
    """A figure of the table below a heading; a time in nanoseconds.

    Args:
        heading: of the table.
        column: its name; the first of that name.
        starts: the first columns of the row.
        of: another column, behind which the first of that name counts.

    Raises:
        ValueError: there is no such table, column, row or number.
    """
    _, found, part = README.read_text(encoding="utf-8").partition(f"### {heading}\n")
    lines = [_cells(line) for line in part.partition("\n### ")[0].splitlines() if line.startswith("|")]
    row = next((line for line in lines if line[: len(starts)] == list(starts)), None)
    heads = lines[0] if lines else []
    first = heads.index(of) if of in heads else 0
    if not found or row is None or column not in heads[first:]:
        raise ValueError(f"{README.name} shows no {column} of {', '.join(starts)} below {heading}")
    text = row[heads.index(column, first)]
    number = re.match(r"([\d.,]+) ?(us|ms|s|)(?= |$)", text)
    if number is None:
        raise ValueError(f"{README.name} shows {text!r} as {column} of {', '.join(starts)} below {heading}")
    return float(number[1].replace(",", "")) * _UNITS[number[2]]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
