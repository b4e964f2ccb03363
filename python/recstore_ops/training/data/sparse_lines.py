"""The common form of libsvm and libffm lines: `label feature feature ...`, a feature being numbers joined by colons.

Parts are separated by spaces or tabs. A label is 0, 1, or -1, which counts as 0: others, such as ratings, are refused.
An id may be any int64; an unsigned 64-bit hash is taken as its int64 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import csv

from recstore_ops.training.data.batch import NO_GROUP, Batch, offsets_of_lengths
from recstore_ops.training.data.row_format import quote
from recstore_ops.training.data.row_source import numbered_names

_NUMBER_CHARACTERS = b"0123456789+-.eE"
_LABELS = (-1, 0, 1)


@dataclass(frozen=True)
class SparseLines:
    """The numbers of B lines with N features together.

    Attributes:
        labels: float32 [B], each 0 or 1.
        lengths: int64 [B], features of each line.
        integers: int64 [P - 1, N], all numbers of the features but the last one.
        values: float32 [N], the last ones.
    """

    labels: NDArray[np.float32]
    lengths: NDArray[np.int64]
    integers: NDArray[np.int64]
    values: NDArray[np.float32]

    @property
    def values_unless_ones(self) -> NDArray[np.float32] | None:
        return None if (self.values == 1).all() else self.values


def parse_sparse_lines(block: bytes, parts: int) -> SparseLines:
    """Parses whole lines whose features have `parts` (P) numbers; blank lines are passed over.

    Raises:
        ValueError: some line is bad.
    """
    rows = [tokens for tokens in map(bytes.split, block.split(b"\n")) if tokens]
    labels = _parse_labels([row[0] for row in rows])
    lengths = np.array([len(row) - 1 for row in rows], dtype=np.int64)
    features = list(chain.from_iterable(row[1:] for row in rows))
    integers, values = _parse_features(features, parts)
    return SparseLines(labels, lengths, integers, values)


def explain_sparse_line(line: bytes, shape: str, parse: Callable[[bytes], object]) -> str:
    """Says which part of a line `parse` refuses, whose features have the `shape`; `parse` takes any part of a line."""
    label, *features = line.split()
    if _fails(parse, label):
        return f"expected 0, 1 or -1 as label, got {quote(label)}"
    wrong = features[_first_failure(features, lambda part: _fails(parse, b" ".join([b"0", *part])))]
    return f"expected {shape} with integer id and finite value, got {quote(wrong)}"


def _first_failure(features: Sequence[bytes], fails: Callable[[Sequence[bytes]], bool]) -> int:
    # A line with a million features must not cost a million calls.
    good, bad = 0, len(features)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(features[good:middle]) else (middle, bad)
    return good


def _fails(parse: Callable[[bytes], object], line: bytes) -> bool:
    try:
        parse(line)
    except ValueError:
        return True
    return False


def _parse_labels(labels: Sequence[bytes]) -> NDArray[np.float32]:
    if b"".join(labels).translate(None, _NUMBER_CHARACTERS):
        raise ValueError("a label is not a number")
    numbers = np.array(list(map(float, labels)), dtype=np.float64)
    if not np.isin(numbers, _LABELS).all():
        raise ValueError("a label is another number")
    return (numbers > 0).astype(np.float32)


def _parse_features(features: Sequence[bytes], parts: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    # Without the characters of numbers only the separators remain, so that one comparison checks
    # every feature; an empty number is left to what parses numbers.
    joined = b"\n".join(features)
    if joined.translate(None, _NUMBER_CHARACTERS) != b"\n".join([b":" * (parts - 1)] * len(features)):
        raise ValueError("a feature has the wrong shape")
    if not features:
        return np.empty((parts - 1, 0), np.int64), np.empty(0, np.float32)
    try:
        return _numbers_by_arrow(joined, parts)
    except pa.ArrowInvalid:
        # Arrow knows neither unsigned numbers beyond int64 beside signed ones nor integers with a plus.
        return _numbers_one_by_one(joined, parts)


def _numbers_by_arrow(joined: bytes, parts: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    names = [str(part) for part in range(parts)]
    table = csv.read_csv(
        pa.BufferReader(joined),
        read_options=csv.ReadOptions(column_names=names, use_threads=False, block_size=2**30),
        parse_options=csv.ParseOptions(delimiter=":", quote_char=False),
        convert_options=csv.ConvertOptions(
            column_types={name: pa.int64() for name in names[:-1]} | {names[-1]: pa.float64()}, null_values=[]
        ),
    )
    numbers = [column.to_numpy() for column in table.columns]
    return np.stack(numbers[:-1]), _finite_float32(numbers[-1])


def _numbers_one_by_one(joined: bytes, parts: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    numbers = joined.replace(b"\n", b":").split(b":")
    integers = np.stack([_int64(numbers[part::parts]) for part in range(parts - 1)])
    values = np.array(list(map(float, numbers[parts - 1 :: parts])), dtype=np.float64)
    return integers, _finite_float32(values)


def _int64(texts: Sequence[bytes]) -> NDArray[np.int64]:
    numbers = list(map(int, texts))
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        return np.array(list(map(_int64_bits, numbers)), dtype=np.int64)


def _int64_bits(number: int) -> int:
    if not -(2**63) <= number < 2**64:
        raise ValueError("an id does not fit 64 bits")
    return number - 2**64 if number >= 2**63 else number


def _finite_float32(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise ValueError("a number is not finite")
    return narrow


# The format libsvm, also called libfm: `label id:value id:value ...`.
#
# What svmlight allows besides: `qid:` after the label says which rows belong to one query, and is their group where it
# is asked for. Comments behind `#` are passed over.

_COMMENT = re.compile(rb"[ \t]*#[^\n]*")
_QUERY = re.compile(rb"^([^ \t\n]+[ \t]+)qid:([0-9]+)[ \t]*", re.MULTILINE)
_MAX_QUERIES = 2**63 - 1
QUERY = "qid"
"""The name of the group of rows."""


class LibsvmFormat:
    """Rows without fields or, for rows of equally many features, with the n-th feature as the n-th field.

    Args:
        num_fields: features of every row, each a field of its own; None takes all features as one field.
        reason: why there are that many, for messages.
        group_name: `QUERY` if the query of each row is its group; None ignores it.
    """

    name = "libsvm"
    dense_names: tuple[str, ...] = ()
    has_labels = True

    def __init__(
        self, num_fields: int | None = None, *, reason: str = "as num_fields says", group_name: str | None = None
    ) -> None:
        self.group_name = group_name
        self._num_fields = num_fields
        self._reason = reason
        self.field_names = ("features",) if num_fields is None else numbered_names("field", num_fields)

    def is_header(self, line: bytes) -> bool:
        return False

    def parse(self, block: bytes) -> Batch:
        lines = parse_sparse_lines(_features_only(block), parts=2)
        lengths = torch.from_numpy(lines.lengths)
        if self._num_fields is not None and not (lengths == self._num_fields).all():
            raise ValueError("a row has another number of features")
        values = lines.values_unless_ones
        return Batch(
            ids=torch.from_numpy(lines.integers[0]),
            labels=torch.from_numpy(lines.labels),
            num_fields=self._num_fields or 1,
            offsets=offsets_of_lengths(lengths) if self._num_fields is None else None,
            values=None if values is None else torch.from_numpy(values),
            groups=None if self.group_name is None else torch.tensor(_groups(block), dtype=torch.int64, device="cpu"),
        )

    def explain(self, line: bytes) -> str:
        try:
            lines = parse_sparse_lines(_features_only(line), parts=2)
        except ValueError:
            return explain_sparse_line(line, "id:value (libsvm)", lambda part: parse_sparse_lines(part, parts=2))
        return f"expected {self._num_fields} features, one a field, {self._reason}, got {lines.lengths[0]}"


def query_of(line: bytes) -> bytes | None:
    """Returns the query of a line, in digits; None without one."""
    found = _QUERY.match(line)
    return None if found is None else found[2]


def _groups(block: bytes) -> list[int]:
    """The query of each line that is a row; a number beyond 63 bits is cut to them."""
    lines = _COMMENT.sub(b"", block).split(b"\n")
    queries = (query_of(line) for line in lines if line.strip())
    return [NO_GROUP if query is None else int(query) % _MAX_QUERIES for query in queries]


def _features_only(block: bytes) -> bytes:
    if b"#" in block:
        block = _COMMENT.sub(b"", block)
    return _QUERY.sub(rb"\1", block) if b"qid:" in block else block


def write_libsvm(path: Path | str, batch: Batch) -> None:
    """Writes rows as `label id:value ...` with labels 0 and 1; values keep every digit, fields become positions."""
    starts = batch.offsets_or_ones()[:: batch.num_fields].tolist()
    pairs = zip(batch.ids.tolist(), batch.values_or_ones().tolist(), strict=True)
    features = [f"{id}:{value:.9g}" for id, value in pairs]
    with open(path, "w", encoding="ascii", newline="\n") as file:
        for row, label in enumerate(batch.labels.tolist()):
            parts = [f"{label:.0f}", *features[starts[row] : starts[row + 1]]]
            file.write(" ".join(parts) + "\n")


class LibffmFormat:
    """Rows with any number of features in each field.

    Args:
        num_fields: fields are 0 to before this; None takes all features as one field, whatever theirs is.
        reason: why there are that many, for messages.
    """

    name = "libffm"
    dense_names: tuple[str, ...] = ()
    has_labels = True
    group_name: str | None = None

    def __init__(self, num_fields: int | None = None, *, reason: str = "as num_fields says") -> None:
        self._num_fields = num_fields
        self._reason = reason
        self.field_names = ("features",) if num_fields is None else numbered_names("field", num_fields)

    def is_header(self, line: bytes) -> bool:
        return False

    def parse(self, block: bytes) -> Batch:
        lines = parse_sparse_lines(block, parts=3)
        return _one_field(lines) if self._num_fields is None else _by_field(lines, self._num_fields)

    def explain(self, line: bytes) -> str:
        try:
            lines = parse_sparse_lines(line, parts=3)
        except ValueError:
            return explain_sparse_line(line, "field:id:value (libffm)", lambda part: parse_sparse_lines(part, parts=3))
        first = np.flatnonzero(_outside(lines.integers[0], self._num_fields or 0))[0]
        wrong = line.split()[1 + first]
        return f"expected a field from 0 to before {self._num_fields}, {self._reason}, got {quote(wrong)}"


def _one_field(lines: SparseLines) -> Batch:
    values = lines.values_unless_ones
    return Batch(
        ids=torch.from_numpy(lines.integers[1]),
        labels=torch.from_numpy(lines.labels),
        offsets=offsets_of_lengths(torch.from_numpy(lines.lengths)),
        values=None if values is None else torch.from_numpy(values),
    )


def _by_field(lines: SparseLines, num_fields: int) -> Batch:
    fields, ids = lines.integers
    if _outside(fields, num_fields).any():
        raise ValueError("a field is out of range")
    num_rows = len(lines.labels)
    bags = np.repeat(np.arange(num_rows), lines.lengths) * num_fields + fields
    # Stable: ids of one field stay in the order of the line.
    order = np.argsort(bags, kind="stable")
    lengths = np.bincount(bags, minlength=num_rows * num_fields)
    values = lines.values_unless_ones
    return Batch(
        ids=torch.from_numpy(ids[order]),
        labels=torch.from_numpy(lines.labels),
        num_fields=num_fields,
        offsets=None if (lengths == 1).all() else offsets_of_lengths(torch.from_numpy(lengths)),
        values=None if values is None else torch.from_numpy(values[order]),
    )


def _outside(fields: np.ndarray, num_fields: int) -> np.ndarray:
    return (fields < 0) | (fields >= num_fields)
