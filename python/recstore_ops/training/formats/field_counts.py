"""Tells from the beginning of a file how many fields its rows have."""

from __future__ import annotations

import re
from pathlib import Path

from recstore_ops.training.formats.libsvm import LibsvmFormat, query_of
from recstore_ops.training.rows.line_blocks import first_lines

LINES_LOOKED_AT = 4096
# Whoever numbers fields like ids, far apart, would get rows of mostly empty fields.
MOST_FIELDS = 4096
_FIELDS = re.compile(rb"[ \t]([0-9]{1,9}):[^ \t:]*:")


def count_libsvm_fields(path: Path) -> int:
    """Returns the number of features of the first good row.

    Raises:
        ValueError: there is no such row with features near the beginning.
    """
    row_format = LibsvmFormat()
    for line in first_lines(path, LINES_LOOKED_AT):
        try:
            num_fields = row_format.parse(line).ids.numel()
        except ValueError:
            continue
        if num_fields > 0:
            return num_fields
    raise ValueError(f"expected id:value (libsvm) in the first {LINES_LOOKED_AT} lines of {path}; give num_fields")


def has_queries(path: Path) -> bool:
    """Whether the first lines of libsvm say which query a row belongs to."""
    return any(map(query_of, first_lines(path, LINES_LOOKED_AT)))


def count_libffm_fields(path: Path) -> int:
    """Returns one more than the largest field in the first lines.

    Raises:
        ValueError: there is no field near the beginning, or they are numbered too far apart to be fields of a row.
    """
    fields = [int(field) for line in first_lines(path, LINES_LOOKED_AT) for field in _FIELDS.findall(line)]
    if not fields:
        raise ValueError(f"expected field:id:value (libffm) in the first {LINES_LOOKED_AT} lines of {path}")
    if max(fields) >= MOST_FIELDS:
        raise ValueError(f"expected fields below {MOST_FIELDS}, got {max(fields)} in {path}; give num_fields")
    return max(fields) + 1
