"""Text of columns between separators, the form of most public click logs.

The native module parses a block of lines into the arrays of a batch, and refuses the whole block if a line is bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from recstore_ops import _native
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.field_ids import VALUE_BITS
from recstore_ops.training.data.row_format import quote

# Kinds of columns of delimited text: what a cell must be.
#
# `rust/recstore-text` reads them by these names: CLICK and RATING are labels, COUNT is a dense value
# `sign(x) ln(1 + |x|)`, HEX, CATEGORY, KEY and HOUR (the hour of the day) are fields.

_HEX_DIGITS = 8


class ColumnKind(Enum):
    """The kind of a column: a description of a valid cell, and an example of one."""

    CLICK = ("0 or 1", b"0")
    RATING = ("a finite number", b"0")
    COUNT = ("an integer or nothing", b"")
    HEX = (f"at most {_HEX_DIGITS} hexadecimal digits", b"")
    CATEGORY = (f"an integer of {VALUE_BITS} bits or nothing", b"")
    KEY = (f"an integer of {VALUE_BITS} bits", b"0")
    HOUR = ("a date and hour YYMMDDHH", b"14102100")
    TIMESTAMP = ("an integer", b"0")
    UNREAD = ("other characters", b"0")

    def __init__(self, expected: str, sample: bytes) -> None:
        self.expected = expected
        self.sample = sample


LABEL_KINDS = (ColumnKind.CLICK, ColumnKind.RATING)
FIELD_KINDS = (ColumnKind.HEX, ColumnKind.CATEGORY, ColumnKind.KEY, ColumnKind.HOUR)


@dataclass(frozen=True)
class Column:
    """A column: the name of its feature, its kind, and its title in a header if that is not the name."""

    name: str
    kind: ColumnKind
    title: str | None = None


class DelimitedFormat:
    """Rows of columns.

    Args:
        name: of the format.
        columns: in order; one is a label, unless rows have none. The id of a field's cell carries the field
            (`field_ids`).
        separator: one character, or two colons.
        has_header: whether files may begin with a line of the columns' names.
        threshold: the least rating that counts as 1.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[Column],
        *,
        separator: bytes,
        has_header: bool = False,
        threshold: float = 0.0,
    ) -> None:
        self.name = name
        self.group_name: str | None = None
        self.field_names = tuple(column.name for column in columns if column.kind in FIELD_KINDS)
        self.dense_names = tuple(column.name for column in columns if column.kind is ColumnKind.COUNT)
        self.has_labels = any(column.kind in LABEL_KINDS for column in columns)
        self._columns = tuple(columns)
        self._kinds = [column.kind.name.lower() for column in columns]
        self._separator = separator
        self._has_header = has_header
        self._threshold = threshold

    def is_header(self, line: bytes) -> bool:
        titles = [(column.title or column.name).encode() for column in self._columns]
        found = line.split(self._separator)
        # A value may look like one name, C1 for example.
        if not self._has_header or len(set(found) & set(titles)) < 2:
            return False
        if found != titles:
            expected = self._separator.join(titles).decode()
            raise ValueError(f"expected the header {expected} ({self.name}), got {quote(line)}")
        return True

    def parse(self, block: bytes) -> Batch:
        num_rows, ids, labels, dense = _native.parse_delimited(block, self._kinds, self._separator, self._threshold)
        num_fields, num_dense = len(self.field_names), len(self.dense_names)
        return Batch(
            ids=_tensor(ids, torch.int64, num_rows * num_fields),
            labels=_tensor(labels, torch.float32, num_rows),
            num_fields=num_fields,
            dense=_tensor(dense, torch.float32, num_rows * num_dense).view(num_rows, num_dense) if num_dense else None,
        )

    def explain(self, line: bytes) -> str:
        cells = line.split(self._separator)
        if len(cells) != len(self._columns):
            separator = self._separator.decode()
            return f"expected {len(self._columns)} columns ({self.name}) between {separator!r}, got {len(cells)}"
        place = next((place for place in range(len(cells)) if self._fails(self._with_samples(cells, place))), 0)
        column = self._columns[place]
        return f"expected {column.kind.expected} as {column.name} ({self.name}), got {quote(cells[place])}"

    def _with_samples(self, cells: Sequence[bytes], place: int) -> bytes:
        """The line of good cells, apart from that at `place`."""
        samples = [column.kind.sample for column in self._columns]
        return self._separator.join([*samples[:place], cells[place], *samples[place + 1 :]])

    def _fails(self, line: bytes) -> bool:
        try:
            self.parse(line + b"\n")
        except ValueError:
            return True
        return False


def _tensor(numbers: bytearray, dtype: torch.dtype, count: int) -> Tensor:
    """The first `count` numbers, without a copy."""
    # An empty buffer has no address that a tensor could have.
    return torch.frombuffer(numbers, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype, device="cpu")


# The Avazu clicks of Kaggle: a comma-separated click, hour and categories, after an id that is not read.
#
# The hour YYMMDDHH becomes the field `hour`, the hour of the day. The header may be absent.

_HEX_NAMES = (
    *("site_id", "site_domain", "site_category"),
    *("app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
_INTEGER_NAMES = ("device_type", "device_conn_type", *(f"C{number}" for number in range(14, 22)))
# The Criteo display ads: a click, 13 counts and 26 hexadecimal values between tabs, any of the latter two missing.
#
# The counts I1 to I13 are the dense features, the values C1 to C26 the fields.

# The MovieLens ratings: user, movie, rating and time, in the three ways that its releases separate them.
#
# A rating of `threshold` or more is the label 1. The time must be an integer and is not used.

_COLUMNS = (
    Column("id", ColumnKind.UNREAD),
    Column("click", ColumnKind.CLICK),
    Column("hour", ColumnKind.HOUR),
    Column("C1", ColumnKind.CATEGORY),
    Column("banner_pos", ColumnKind.CATEGORY),
    *(Column(name, ColumnKind.HEX) for name in _HEX_NAMES),
    *(Column(name, ColumnKind.CATEGORY) for name in _INTEGER_NAMES),
)


_UNLABELLED = tuple(column for column in _COLUMNS if column.kind is not ColumnKind.CLICK)
AVAZU_HEADERS = [[column.name.encode() for column in columns] for columns in (_COLUMNS, _UNLABELLED)]
"""The cells of its header, with the label and without."""


def avazu_format(*, labelled: bool = True) -> DelimitedFormat:
    """Returns the format, of rows with labels or without."""
    columns = _COLUMNS if labelled else _UNLABELLED
    return DelimitedFormat("avazu", columns, separator=b",", has_header=True)


_CRITEO_COLUMNS = (
    Column("label", ColumnKind.CLICK),
    *(Column(f"I{number}", ColumnKind.COUNT) for number in range(1, 14)),
    *(Column(f"C{number}", ColumnKind.HEX) for number in range(1, 27)),
)


def criteo_format(*, labelled: bool = True) -> DelimitedFormat:
    """Returns the format, of rows with labels or without."""
    columns = _CRITEO_COLUMNS if labelled else _CRITEO_COLUMNS[1:]
    return DelimitedFormat("criteo", columns, separator=b"\t")


DEFAULT_THRESHOLD = 4.0

_MOVIELENS_COLUMNS = (
    Column("user", ColumnKind.KEY, title="userId"),
    Column("movie", ColumnKind.KEY, title="movieId"),
    Column("rating", ColumnKind.RATING),
    Column("timestamp", ColumnKind.TIMESTAMP),
)
RATINGS_HEADER = [(column.title or column.name).encode() for column in _MOVIELENS_COLUMNS]
"""The cells of the header of `ratings.csv`."""

MovieLensKind = Literal["ratings.csv", "ratings.dat", "u.data"]

_SEPARATORS: dict[MovieLensKind, bytes] = {"ratings.csv": b",", "ratings.dat": b"::", "u.data": b"\t"}


def movielens_format(kind: MovieLensKind, threshold: float = DEFAULT_THRESHOLD) -> DelimitedFormat:
    """Returns the format of the files of that name; only `ratings.csv` may have a header."""
    return DelimitedFormat(
        "movielens",
        _MOVIELENS_COLUMNS,
        separator=_SEPARATORS[kind],
        has_header=kind == "ratings.csv",
        threshold=threshold,
    )
