"""The interface of a text format."""

from __future__ import annotations

from typing import Protocol

from recstore_ops.training.data.batch import Batch

_QUOTED_CHARACTERS = 40


class RowFormat(Protocol):
    """A text format with one row a line.

    Lines end with LF and have neither CR nor NUL: the reader of a file ensures that for all formats.
    """

    @property
    def name(self) -> str: ...

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the F fields."""
        ...

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the J dense features."""
        ...

    @property
    def has_labels(self) -> bool:
        """Whether rows have labels; those without have NaN."""
        ...

    @property
    def group_name(self) -> str | None:
        """The name of the rows' groups; None if rows are not grouped."""
        ...

    def is_header(self, line: bytes) -> bool:
        """Returns whether a file's first line, without its end, is a header instead of a row.

        Raises:
            ValueError: it is a header of other columns.
        """
        ...

    def parse(self, block: bytes) -> Batch:
        """Parses whole lines; skips blank ones.

        Raises:
            ValueError: a line is bad. `explain` says which part of it and why.
        """
        ...

    def explain(self, line: bytes) -> str:
        """Explains why `parse` refuses a line, given without its end: the expected content and the actual one."""
        ...


def quote(part: bytes) -> str:
    """Returns a part of a line for a message: in quotes, printable, cut if it is long."""
    text = part[: _QUOTED_CHARACTERS + 1].decode("ascii", errors="backslashreplace")
    return repr(text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "...")
