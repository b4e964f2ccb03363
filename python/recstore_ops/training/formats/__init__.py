"""The formats of files with labelled rows."""

from recstore_ops.training.formats.detection import FormatName
from recstore_ops.training.formats.opening import open_rows

__all__ = ["FormatName", "open_rows"]
