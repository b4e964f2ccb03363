"""Tables of HTML: on the pages of runs, and in notebooks, which show an object by its `_repr_html_`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def html_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, figures_from: int = 0, best: int | None = None
) -> str:
    """Returns a table; columns from `figures_from` on are figures, and the row `best` stands out."""
    marks = ["" if place < figures_from else ' class="figure"' for place in range(len(titles))]
    head = "".join(f"<th{mark}>{escape(title)}</th>" for mark, title in zip(marks, titles, strict=True))
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True))
        mark = ' class="best"' if number == best else ""
        lines.append(f"<tr{mark}>{cells}</tr>\n")
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table>\n"


def html_facts(title: str, facts: Mapping[str, Any]) -> str:
    """Returns a table with a row for each fact, below the title of what they are about."""
    return html_table((title, ""), ((name.replace("_", " "), shown(value)) for name, value in facts.items()))


def shown(value: Any) -> str:
    """A value of a configuration or a report in words and figures."""
    if isinstance(value, dict):
        return ", ".join(str(item) if key == "kind" else f"{key} {item}" for key, item in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


class Figures(dict[str, Any]):
    """A dictionary that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return html_facts("", self)
