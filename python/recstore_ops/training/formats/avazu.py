"""The Avazu clicks of Kaggle: a comma-separated click, hour and categories, after an id that is not read.

The hour YYMMDDHH becomes the field `hour`, the hour of the day. The header may be absent.
"""

from __future__ import annotations

from recstore_ops.training.formats.columns import Column, ColumnKind
from recstore_ops.training.formats.delimited import DelimitedFormat

_HEX_NAMES = (
    *("site_id", "site_domain", "site_category"),
    *("app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
_INTEGER_NAMES = ("device_type", "device_conn_type", *(f"C{number}" for number in range(14, 22)))
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
