"""Tells a file's format by its first lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from recstore_ops.training.formats.movielens import RATINGS_HEADER, MovieLensKind
from recstore_ops.training.rows.line_blocks import first_lines
from recstore_ops.training.rows.row_format import quote

FormatName = Literal["libsvm", "libffm", "criteo", "avazu", "movielens", "parquet"]

LINES_LOOKED_AT = 4096
_PARQUET_MAGIC = b"PAR1"
_CRITEO_TABS = 39
_AVAZU_COMMAS = 23
_BEST_RATING = 10


def detect_format(path: Path) -> FormatName:
    """Returns the format of the first line that has the shape of one.

    Lines of a label alone are libsvm if no other line follows, for they are rows without features.

    Raises:
        ValueError: no line has such a shape, or there is none; the message tells which formats there are.
    """
    with open(path, "rb") as file:
        if file.read(4) == _PARQUET_MAGIC:
            return "parquet"
    lines = list(_lines_with_content(path))
    for line in lines:
        # Rows of other columns may look like ratings.
        if (shape := _shape(line)) is not None and not (shape == "movielens" and _names_other_columns(lines[0])):
            return shape
    if any(_is_label(line) for line in lines):
        return "libsvm"
    names = ", ".join(get_args(FormatName))
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


def _lines_with_content(path: Path) -> Iterator[bytes]:
    return (line for line in first_lines(path, LINES_LOOKED_AT) if line.strip())


def _shape(line: bytes) -> FormatName | None:
    if _movielens_shape(line) is not None:
        return "movielens"
    first_feature = line.split()[1:2]
    colons = first_feature[0].count(b":") if first_feature else 0
    if colons in (1, 2):
        return "libsvm" if colons == 1 else "libffm"
    if line.count(b"\t") == _CRITEO_TABS:
        return "criteo"
    return "avazu" if line.count(b",") == _AVAZU_COMMAS else None


def _movielens_shape(line: bytes) -> MovieLensKind | None:
    if len(line.split(b"::")) == 4:
        return "ratings.dat"
    if b":" in line:
        return None
    if line.count(b",") == 3:
        return "ratings.csv" if _has_rating(line.split(b",")) else None
    return "u.data" if line.count(b"\t") == 3 and _has_rating(line.split(b"\t")) else None


def _names_other_columns(line: bytes) -> bool:
    """Whether a line is a header of four columns that are not those of MovieLens."""
    cells = [cell.strip() for cell in line.replace(b"\t", b",").split(b",")]
    return len(cells) == 4 and cells != RATINGS_HEADER and not any(_is_label(cell) for cell in cells)


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
