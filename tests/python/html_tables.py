"""Tables of HTML read back: those of a page, and those that a notebook shows of an object."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

_OF_TABLES = ("table", "thead", "tbody", "tr", "th", "td")


class TableReader(HTMLParser):
    """The cells of the tables of a text by row; each element that begins ends, in order."""

    void: frozenset[str] = frozenset()
    """The elements that have no end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


class Shown(TableReader):
    """The rows of the tables that a notebook shows of an object, which are all that it shows."""

    def __init__(self, shown: Any) -> None:
        super().__init__(shown._repr_html_())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _OF_TABLES, tag
        super().handle_starttag(tag, attrs)
