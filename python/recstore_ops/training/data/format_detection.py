"""Detects a file's format from its first lines.

A header of other columns than those of Avazu or MovieLens makes a file `csv`: text with named columns. Without a
header, the first line that has the shape of a format decides. If there is none, the format is `csv`, provided that
the lines are cut alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from recstore_ops.training.data.compressed_file import read_start
from recstore_ops.training.data.csv_dialect import Dialect, detect_dialect, encoding_of
from recstore_ops.training.data.delimited import AVAZU_HEADERS, RATINGS_HEADER, MovieLensKind
from recstore_ops.training.data.row_format import quote
from recstore_ops.training.data.text_rows import first_lines

FormatName = Literal["libsvm", "libffm", "criteo", "avazu", "movielens", "csv", "parquet"]

LINES_LOOKED_AT = 4096
_PARQUET_MAGIC = b"PAR1"
CRITEO_TABS = 39
AVAZU_COMMAS = 23
_CRITEO_COUNTS = 13
_BEST_RATING = 10
_HEX = re.compile(rb"[0-9a-fA-F]{0,8}")
_INTEGER = re.compile(rb"(-?[0-9]+)?")


def detect_format(path: Path) -> FormatName:
    """Returns the format of a file.

    Lines with only a label are libsvm rows without features, if no line has the shape of a format.

    Raises:
        ValueError: no line has the shape of a format, or there is no line; the message lists the formats.
    """
    with open(path, "rb") as file:
        if file.read(4) == _PARQUET_MAGIC:
            return "parquet"
    if is_wide_text(path):
        return "csv"
    dialect = detect_dialect(path)
    lines = list(_lines_with_content(path))
    names = ", ".join(get_args(FormatName))
    if lines and _is_json(*(line.strip() for line in lines[:2])):
        raise ValueError(f"expected a file in one of the formats {names}, but {path} has JSON, which is not read")
    if dialect is not None and dialect.has_header:
        return _format_of_header(dialect)
    for line in lines:
        if (shape := _shape(line)) is not None:
            return shape
    if dialect is not None:
        return "csv"
    if any(_is_label(line) for line in lines):
        return "libsvm"
    found = f"begins with {quote(lines[0])}" if lines else "has no line of text"
    raise ValueError(f"expected a file in one of the formats {names}, but {path} {found}")


def movielens_kind(path: Path) -> MovieLensKind:
    """Returns how the columns of a MovieLens file are separated: as in the first line that has the shape of a row.

    Raises:
        ValueError: no line has.
    """
    for line in _lines_with_content(path):
        if (kind := _movielens_shape(line)) is not None:
            return kind
    raise ValueError(f"expected four columns between ',', '::' or tabs (movielens) in {path}, got no such line")


def has_labels(path: Path, separator: bytes, labelled: int) -> bool:
    """Whether the first line that is cut into the columns of a format, or these without the label, has the label."""
    counts = (line.count(separator) for line in _lines_with_content(path))
    return next((count for count in counts if count in (labelled, labelled - 1)), labelled) == labelled


def is_wide_text(path: Path) -> bool:
    """Whether a byte order mark says that characters have two bytes."""
    return encoding_of(read_start(path, 2)) != "utf-8"


def _is_json(line: bytes, following: bytes = b"{") -> bool:
    """Whether the first line of a file is an object or a list, or begins one, and the next line goes on so."""
    if not following.startswith((b"{", b"[", b'"', b"}", b"]")):
        return False
    if line in (b"{", b"[") or line.startswith((b"[{", b'{"')):
        return True
    try:
        return isinstance(json.loads(line), list | dict)
    except ValueError:
        return False


def _format_of_header(dialect: Dialect) -> FormatName:
    names = [name.encode() for name in dialect.names]
    if dialect.delimiter == "," and names == RATINGS_HEADER:
        return "movielens"
    return "avazu" if dialect.delimiter == "," and names in AVAZU_HEADERS else "csv"


def _lines_with_content(path: Path) -> Iterator[bytes]:
    return (line for line in first_lines(path, LINES_LOOKED_AT) if line.strip())


def _shape(line: bytes) -> FormatName | None:
    if _movielens_shape(line) is not None:
        return "movielens"
    first_feature = line.split()[1:2]
    colons = first_feature[0].count(b":") if first_feature else 0
    if colons in (1, 2):
        return "libsvm" if colons == 1 else "libffm"
    if _is_criteo(line.split(b"\t")):
        return "criteo"
    return "avazu" if line.count(b",") == AVAZU_COMMAS else None


def _is_criteo(cells: Sequence[bytes]) -> bool:
    """Whether cells are a row of Criteo, with its label or without; others may have as many tabs."""
    if len(cells) not in (CRITEO_TABS, CRITEO_TABS + 1):
        return False
    features = cells[-CRITEO_TABS:]
    counts, values = features[:_CRITEO_COUNTS], features[_CRITEO_COUNTS:]
    return all(map(_INTEGER.fullmatch, counts)) and all(map(_HEX.fullmatch, values))


def _movielens_shape(line: bytes) -> MovieLensKind | None:
    if len(line.split(b"::")) == 4:
        return "ratings.dat"
    if b":" in line:
        return None
    if line.count(b",") == 3:
        return "ratings.csv" if _has_rating(line.split(b",")) else None
    return "u.data" if line.count(b"\t") == 3 and _has_rating(line.split(b"\t")) else None


def _has_rating(cells: Sequence[bytes]) -> bool:
    """Whether four cells are a header of MovieLens, or two ids, a rating and a time: other columns are no ratings."""
    if [cell.strip() for cell in cells] == RATINGS_HEADER:
        return True
    user, movie, rating, time = cells
    ids = all(cell.strip().isdigit() for cell in (user, movie, time))
    return ids and _is_label(rating) and 0 <= float(rating) <= _BEST_RATING


def _is_label(line: bytes) -> bool:
    try:
        float(line)
    except ValueError:
        return False
    return True
