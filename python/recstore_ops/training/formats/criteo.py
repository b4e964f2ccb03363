"""The Criteo display ads: a click, 13 counts and 26 hexadecimal values between tabs, any of the latter two missing.

The counts I1 to I13 are the dense features, the values C1 to C26 the fields.
"""

from __future__ import annotations

from recstore_ops.training.formats.columns import Column, ColumnKind
from recstore_ops.training.formats.delimited import DelimitedFormat

_COLUMNS = (
    Column("label", ColumnKind.CLICK),
    *(Column(f"I{number}", ColumnKind.COUNT) for number in range(1, 14)),
    *(Column(f"C{number}", ColumnKind.HEX) for number in range(1, 27)),
)


def criteo_format(*, labelled: bool = True) -> DelimitedFormat:
    """Returns the format, of rows with labels or without."""
    columns = _COLUMNS if labelled else _COLUMNS[1:]
    return DelimitedFormat("criteo", columns, separator=b"\t")
