"""Detects from the first lines of a text file how its columns are separated and named.

The separator is the one among comma, tab, semicolon and `|` that cuts nearly all lines alike, into the most columns.
A first line without a number is a header. One that repeats a name is a header only if no other line has that name and
some column has numbers in all other lines. A header such as `user_id:token` names types too, as RecBole writes them.
Without a header the columns are column_1, column_2 and so on; 40 columns, or 39 without the label, get Criteo's names.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recstore_ops.training.data.compressed_file import read_start

_DELIMITERS = (",", "\t", ";", "|")
_HEAD_BYTES = 2**16
_LINES = 50
_ALIKE = 0.9
_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_CRITEO_NAMES = ("label", *(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27)))
_TYPES = {"token": "string", "token_seq": "words", "float": "number", "float_seq": "numbers"}


@dataclass(frozen=True)
class Dialect:
    """How a file is written.

    Attributes:
        delimiter: between columns.
        encoding: of the text.
        has_header: whether the first line has the names.
        names: of the columns.
        types: that the header says: "string", "words" for several between spaces, "number" or "numbers".
    """

    delimiter: str
    encoding: str
    has_header: bool
    names: tuple[str, ...]
    types: Mapping[str, str] = field(default_factory=dict)


def detect_dialect(path: Path) -> Dialect | None:
    """Returns how a file is written; None if no separator cuts its lines alike into two columns or more.

    Raises:
        ValueError: a compressed stream is damaged.
    """
    text, encoding = _head(path)
    best: tuple[int, str, list[list[str]]] | None = None
    for delimiter in _DELIMITERS:
        rows = _rows(text, delimiter)
        width, count = Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
        if width > 1 and count >= _ALIKE * len(rows) and (best is None or width > best[0]):
            best = (width, delimiter, rows)
    if best is None:
        return None
    width, delimiter, rows = best
    has_header = is_header(rows[0]) or _repeats_names(rows)
    names, types = _named(rows[0]) if has_header else (_numbered(width), {})
    return Dialect(delimiter, encoding, has_header, names, types)


def is_header(cells: Sequence[str]) -> bool:
    """Whether cells are names: none is a number, and they differ."""
    names = [cell.strip() for cell in cells]
    return not any(map(_is_number, names)) and len(set(names)) == len(names) and sum(map(bool, names)) >= len(names) - 1


def _repeats_names(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first line has names and repeats one; the other lines decide that it is a header."""
    names, others = [cell.strip() for cell in rows[0]], rows[1:]
    repeated = {name for name in names if name and names.count(name) > 1}
    if not repeated or not others or any(map(_is_number, names)):
        return False
    is_in_others = any(cell.strip() in repeated for row in others for cell in row)
    return not is_in_others and any(all(map(_is_number, cells)) for cells in zip(*others, strict=False))


def encoding_of(start: bytes) -> str:
    """Returns the encoding that a byte order mark names; UTF-8 without a mark."""
    return _BYTE_ORDER_MARKS.get(start[:2], "utf-8")


def _head(path: Path) -> tuple[str, str]:
    """Returns the whole lines at the beginning of a file, and its encoding."""
    start = read_start(path, _HEAD_BYTES)
    encoding = encoding_of(start)
    text = start.decode("utf-8-sig" if encoding == "utf-8" else encoding, errors="replace")
    return text if len(start) < _HEAD_BYTES else text[: text.rfind("\n") + 1], encoding


def _rows(text: str, delimiter: str) -> list[list[str]]:
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            if row and any(map(str.strip, row)):
                rows.append(row)
            if len(rows) == _LINES:
                break
    except csv.Error:
        return []
    return rows


def _named(cells: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    names = [cell.strip() or f"Unnamed: {place}" for place, cell in enumerate(cells)]
    parts = [name.rpartition(":") for name in names]
    if not all(name and kind in _TYPES for name, _, kind in parts):
        return tuple(names), {}
    return tuple(name for name, _, _ in parts), {name: _TYPES[kind] for name, _, kind in parts}


def _numbered(width: int) -> tuple[str, ...]:
    if width in (len(_CRITEO_NAMES), len(_CRITEO_NAMES) - 1):
        return _CRITEO_NAMES[-width:]
    return tuple(f"column_{number}" for number in range(1, width + 1))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
