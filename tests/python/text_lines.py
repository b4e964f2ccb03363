"""Text formats as tests see them: good lines to draw, and parsers in plain Python that share nothing with the package.

A row is its label, its fields, each the pairs of an id and a value, and its dense features.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.delimited import avazu_format, criteo_format, movielens_format
from recstore_ops.training.data.row_format import RowFormat
from recstore_ops.training.data.sparse_lines import LibffmFormat, LibsvmFormat

Pairs = tuple[tuple[int, float], ...]
Row = tuple[int, tuple[Pairs, ...], tuple[float, ...]]
# Gives a line's row, None if it is bad.
PlainParser = Callable[[bytes], Row | None]

NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
DECIMAL = re.compile(rb"-?(\d+(\.\d*)?|\.\d+)")
INTEGER = re.compile(rb"-?\d+")
SIGNED_INTEGER = re.compile(rb"[+-]?\d+")
HEX = re.compile(rb"[0-9a-fA-F]{0,8}")
MISSING = 1 << 32


@dataclass(frozen=True)
class TextCase:
    """A format, what draws good lines of it, what parses them in plain Python, and a good line."""

    row_format: RowFormat
    lines: st.SearchStrategy[bytes]
    parse: PlainParser
    good: bytes


def as_rows(batch: Batch) -> list[Row]:
    """Returns a batch's rows as plain Python."""
    pairs = list(zip(batch.ids.tolist(), batch.values_or_ones().tolist(), strict=True))
    offsets = batch.offsets_or_ones().tolist()
    bags = [tuple(pairs[start:stop]) for start, stop in pairwise(offsets)]
    fields = batch.num_fields
    dense = [()] * len(batch) if batch.dense is None else [tuple(row) for row in batch.dense.tolist()]
    return [
        (int(label), tuple(bags[row * fields : (row + 1) * fields]), dense[row])
        for row, label in enumerate(batch.labels.tolist())
    ]


def float32(text: bytes) -> float | None:
    """Returns the number of a text, None if it is no finite 32-bit number."""
    if not NUMBER.fullmatch(text):
        return None
    with np.errstate(over="ignore"):
        number = float(np.float32(float(text)))
    return number if math.isfinite(number) else None


def int64(text: bytes) -> int | None:
    """Returns the bits of an integer below 2**64, None for anything else."""
    if not SIGNED_INTEGER.fullmatch(text) or not -(2**63) <= int(text) < 2**64:
        return None
    return int(text) - 2**64 if int(text) >= 2**63 else int(text)


def parse_libsvm(line: bytes, num_fields: int | None = None) -> Row | None:
    label, *features = line.split()
    return sparse_row(label, [[b"0", *feature.split(b":")] for feature in features], positions=num_fields)


def parse_libffm(line: bytes, num_fields: int | None = None) -> Row | None:
    label, *features = line.split()
    return sparse_row(label, [feature.split(b":") for feature in features], groups=num_fields)


def sparse_row(
    label: bytes, features: list[list[bytes]], *, positions: int | None = None, groups: int | None = None
) -> Row | None:
    number = float32(label)
    parsed = [[int64(part) for part in feature[:2]] + [float32(part) for part in feature[2:]] for feature in features]
    if number not in (-1, 0, 1) or any(len(feature) != 3 or None in feature for feature in parsed):
        return None
    triples = [(int(field or 0), (int(id or 0), float(value or 0))) for field, id, value in parsed]
    pairs = tuple(pair for _, pair in triples)
    if positions is not None:
        return (int(number > 0), tuple((pair,) for pair in pairs), ()) if len(pairs) == positions else None
    if groups is None:
        return int(number > 0), (pairs,), ()
    if any(not 0 <= field < groups for field, _ in triples):
        return None
    bags = tuple(tuple(pair for field, pair in triples if field == group) for group in range(groups))
    return int(number > 0), bags, ()


def field_row(label: int | None, values: list[int | None], dense: list[float | None]) -> Row | None:
    if label is None or None in values or None in dense:
        return None
    ids = [(field << 40) + (int(value or 0) % 2**40) for field, value in enumerate(values)]
    return label, tuple(((id, 1.0),) for id in ids), tuple(float(number or 0) for number in dense)


def click(cell: bytes) -> int | None:
    return int(cell) if INTEGER.fullmatch(cell) and int(cell) in (0, 1) else None


def count(cell: bytes) -> float | None:
    if cell == b"":
        return 0.0
    if not INTEGER.fullmatch(cell) or not -(2**63) <= int(cell) < 2**63:
        return None
    return float(np.float32(math.copysign(math.log1p(abs(int(cell))), int(cell))))


def hex_value(cell: bytes) -> int | None:
    if not HEX.fullmatch(cell):
        return None
    return int(cell, 16) if cell else MISSING


def key(cell: bytes) -> int | None:
    return int(cell) if INTEGER.fullmatch(cell) and -(2**39) <= int(cell) < 2**39 else None


def category(cell: bytes) -> int | None:
    return key(cell) if cell else MISSING


def hour(cell: bytes) -> int | None:
    number = int(cell) if INTEGER.fullmatch(cell) else -1
    if not 0 <= number < 10**8:
        return None
    _, month, day, hour_of_day = (int(f"{number:08}"[at : at + 2]) for at in (0, 2, 4, 6))
    return hour_of_day if 1 <= month <= 12 and 1 <= day <= 31 and hour_of_day < 24 else None


def parse_criteo(line: bytes) -> Row | None:
    cells = line.split(b"\t")
    if len(cells) != 40:
        return None
    return field_row(click(cells[0]), list(map(hex_value, cells[14:])), list(map(count, cells[1:14])))


def parse_avazu(line: bytes) -> Row | None:
    cells = line.split(b",")
    if len(cells) != 24 or not re.fullmatch(rb"[0-9a-fA-F-]*", cells[0]):
        return None
    values = [hour(cells[2]), *map(category, cells[3:5]), *map(hex_value, cells[5:14]), *map(category, cells[14:])]
    return field_row(click(cells[1]), values, [])


def parse_movielens(line: bytes, separator: bytes) -> Row | None:
    cells = line.split(separator)
    if len(cells) != 4 or not DECIMAL.fullmatch(cells[2]) or not INTEGER.fullmatch(cells[3]):
        return None
    if not math.isfinite(float(cells[2])) or not -(2**63) <= int(cells[3]) < 2**63:
        return None
    return field_row(int(float(cells[2]) >= 4), [key(cells[0]), key(cells[1])], [])


def joined(separator: str, *cells: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    return st.tuples(*cells).map(lambda drawn: separator.join(drawn).encode())


def numbers(least: int, most: int) -> st.SearchStrategy[str]:
    return st.integers(least, most).map(str)


def features(parts: st.SearchStrategy[str], least: int = 0, most: int = 4) -> st.SearchStrategy[str]:
    return st.lists(parts, min_size=least, max_size=most).map("".join)


labels = st.sampled_from(["0", "1", "-1", "+1", "1e0", "0.0"])
values = st.one_of(st.just("1"), st.floats(-(2.0**99), 2.0**99, width=32).map(lambda value: f"{value:.9g}"))
spaces = st.sampled_from([" ", "\t"])
int64s = st.one_of(numbers(0, 9), numbers(-(2**63), 2**63 - 1), numbers(2**63, 2**64 - 1))
libsvm_feature = st.builds("{}{}:{}".format, spaces, int64s, values)
libffm_feature = st.builds("{}{}:{}:{}".format, spaces, numbers(0, 2), int64s, values)
clicks = st.sampled_from(["0", "1"])
counts = st.one_of(st.just(""), numbers(-3, 1000), numbers(-(2**63), 2**63 - 1))
hex_cells = st.one_of(
    st.text("0123456789abcdef", min_size=8, max_size=8), st.text("0123456789abcdefABCDEF", max_size=8)
)
keys = st.one_of(numbers(-1, 1000), numbers(-(2**39), 2**39 - 1))
categories = st.one_of(st.just(""), keys)
hours = st.builds("{:02}{:02}{:02}{:02}".format, *(st.integers(*ends) for ends in ((0, 99), (1, 12), (1, 31), (0, 23))))
ratings = st.sampled_from(["0.5", "3.5", "4", "4.0", "5", "3.999", "-1", ".5", "5."])
times = numbers(-(2**63), 2**63 - 1)
criteo_cells = (clicks, *[counts] * 13, *[hex_cells] * 26)
avazu_cells = (numbers(0, 2**70), clicks, hours, *[categories] * 2, *[hex_cells] * 9, *[categories] * 10)
movielens_cells = (keys, keys, ratings, times)

CRITEO_LINE = b"\t".join([b"1", *[b"%d" % n for n in range(12)], b"", *[b"%08x" % n for n in range(25)], b""])
AVAZU_LINE = b"10000169349117863715,0,14102123,1005,0," + b"1fbe01fe," * 9 + b"1,0,15706,320,50,1722,0,35,-1,79"

CASES = {
    "libsvm": TextCase(LibsvmFormat(), joined("", labels, features(libsvm_feature)), parse_libsvm, b"1 3:0.5 4:1"),
    "libsvm by position": TextCase(
        LibsvmFormat(2),
        joined("", labels, features(libsvm_feature, 2, 2)),
        lambda line: parse_libsvm(line, 2),
        b"1 3:0.5 4:1",
    ),
    "libffm": TextCase(LibffmFormat(), joined("", labels, features(libffm_feature)), parse_libffm, b"0 1:3:0.5 0:4:1"),
    "libffm by field": TextCase(
        LibffmFormat(3),
        joined("", labels, features(libffm_feature)),
        lambda line: parse_libffm(line, 3),
        b"0 2:3:0.5 0:4:1 2:-7:1",
    ),
    "criteo": TextCase(criteo_format(), joined("\t", *criteo_cells), parse_criteo, CRITEO_LINE),
    "avazu": TextCase(avazu_format(), joined(",", *avazu_cells), parse_avazu, AVAZU_LINE),
    "ratings.csv": TextCase(
        movielens_format("ratings.csv"),
        joined(",", *movielens_cells),
        lambda line: parse_movielens(line, b","),
        b"1,296,5.0,1147880044",
    ),
    "ratings.dat": TextCase(
        movielens_format("ratings.dat"),
        joined("::", *movielens_cells),
        lambda line: parse_movielens(line, b"::"),
        b"1::1193::5::978300760",
    ),
    "u.data": TextCase(
        movielens_format("u.data"),
        joined("\t", *movielens_cells),
        lambda line: parse_movielens(line, b"\t"),
        b"196\t242\t3\t881250949",
    ),
}
